"""Every error and warning of the project, under one root each. Imports nothing of ours.

AotTuneError
  UsageError                 a command, an option or a variable is wrong
    ArchError                it names no architecture that cuTile compiles for
  DeclarationError           a declaration contradicts itself
  TableError                 a file is not a table
    NewerSchemaError         a later release wrote it
  StoreError                 a file cannot be read or written
  ArchiveError               a file is not an archive of cubins, or is damaged
  TuneError                  a sweep cannot go on
    JournalMismatchError     its journal is of other code, another GPU or another compiler
  LaunchError                an argument or a config cannot be launched
  CutileError                cuTile or its compiler refuses
    CompilerMissingError     no compiler is installed, and no cubin was shipped
AotTuneWarning
  TableWarning, MissWarning, CacheWarning, CubinWarning, EntryPointWarning
"""

from __future__ import annotations


class AotTuneError(Exception):
    """The root: catching it catches all that aot_tune raises on purpose."""


class UsageError(AotTuneError):
    """A request that cannot be met as it was written: an unknown arch, kernel or problem (exit code 2)."""


class ArchError(UsageError):
    """A text that names no GPU architecture."""


class DeclarationError(AotTuneError):
    """A kernel's declaration contradicts itself; the message says what to write instead."""


class TableError(AotTuneError):
    """A document that is not a table of this schema. Names the place as a dotted path.

    Attributes:
        path: Where in the document, such as ``entries[3].config.hints.num_ctas``; empty for the whole.
        problem: What was found and what was expected.
    """

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{problem} (at {path})" if path else problem)
        self.problem = problem
        self.path = path


class NewerSchemaError(TableError):
    """A table written by a later release of aot_tune."""


class StoreError(AotTuneError):
    """A folder or file of tables cannot be read or written; names the path and the next step."""


class TuneError(AotTuneError):
    """A sweep cannot start, go on or publish; names the reason and the next step (exit code 1)."""


class JournalMismatchError(TuneError):
    """A sweep's journal was made under other conditions: driver, compiler, source or GPU changed."""


class LaunchError(AotTuneError):
    """A call's arguments cannot be launched: names the argument and what to pass instead."""


class CutileError(AotTuneError):
    """cuTile cannot do what was asked of it in this installation: a version, the compiler, a symbol."""


class CompilerMissingError(CutileError):
    """A kernel would have to be compiled where no compiler is installed."""


class ArchiveError(AotTuneError):
    """A file that is not an archive of cubins, or is damaged; names the place in it."""


class AotTuneWarning(UserWarning):
    """The root of the warnings. Serving goes on after each of them."""


class TableWarning(AotTuneWarning):
    """A table was left out or is used with a reservation."""


class MissWarning(AotTuneWarning):
    """A problem has no tuned entry; names the command that would tune it."""


class CacheWarning(AotTuneWarning):
    """The user's cache was left out or could not be written."""


class CubinWarning(AotTuneWarning):
    """Prebuilt cubins were left out; the kernel is compiled on its first launch instead."""


class EntryPointWarning(AotTuneWarning):
    """An installed package's kernels were left out: its entry point leads nowhere."""
