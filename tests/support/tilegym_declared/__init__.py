"""Six operations of TileGym 1.5.1, whose kernels nobody here wrote, each declared in a module of its own."""

import sys

from tests.support.tilegym_sites import FOLDER

if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
