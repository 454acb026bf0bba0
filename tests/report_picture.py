"""Draw the README's picture of a report: ``python -m tests.report_picture``."""

from __future__ import annotations

import re
from pathlib import Path

from aot_tune.cli.documents.declared import DeclaredDocument
from aot_tune.cli.report.page import Shown, gains
from aot_tune.cli.report.pictures import STYLE
from aot_tune.tables import files

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".github" / "gains.svg"
TABLE = ROOT / "tuned_configs" / "sm90" / "layer_norm.json"


def drawn() -> tuple[str, str]:
    """The picture, readable on any background, and its text."""
    figure = gains(Shown(new=DeclaredDocument.read(TABLE)))
    picture = re.findall(r"<svg .*</svg>", figure)[0]
    label = re.findall(r'aria-label="([^"]*)"', picture)[0]
    still = re.sub(r"<title>.*?</title>", "", picture)
    opening, rest = still.split(">", 1)
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{opening}><style>{STYLE.replace('svg ', '')}</style>{ground}{rest}\n", label


if __name__ == "__main__":
    files.write_atomic(FILE, drawn()[0].encode())
