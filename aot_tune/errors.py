"""Every error and warning that aot_tune raises on purpose. Imports nothing else of the package.

::

    Exception
      AotTuneError                a base to catch them all
        UsageError                a request that cannot be met as it was written
          ArchError               a text that does not name a GPU architecture
        DeclarationError          a declaration that contradicts itself
          ArgumentsError          a problem for which make_args or reference raises
        TableError                a document that is not a table of this schema
          NewerSchemaError        a table of a later release
        StoreError                tables that cannot be read or written
        TuneError                 a sweep that cannot start, go on or publish
          JournalMismatchError    a journal made under other conditions
        LaunchError               a call that cannot be launched
          MissError               a miss where AOT_TUNE_ON_MISS=error
        CutileError               a request that cuTile cannot meet in this installation
          CompilerMissingError    a compilation where no compiler is installed
        ArchiveError              a file that is not a whole archive of cubins
        NotRecordableError        a library's search that cannot be identified: cuTile's own search is made
          UnspelledError          a config whose content cannot be identified
    UserWarning
      AotTuneWarning              a base for the warnings; serving goes on after each
        TableWarning              a table left out, or used with a reservation
        MissWarning               a problem without a tuned entry
        CacheWarning              a user's cache left out, or not written
        CubinWarning              prebuilt cubins left out
        EntryPointWarning         an installed package's kernels left out
"""

from __future__ import annotations


class AotTuneError(Exception):
    """Base of every error that aot_tune raises on purpose."""


class UsageError(AotTuneError):
    """A request cannot be met as it was written: an unknown arch, kernel or problem (exit code 2)."""


class ArchError(UsageError):
    """A text does not name a GPU architecture."""


class DeclarationError(AotTuneError):
    """A kernel's declaration contradicts itself; the message names what to write instead."""


class ArgumentsError(DeclarationError):
    """`make_args` or `reference` raises for one problem; other problems may work."""


class TableError(AotTuneError):
    """A document is not a table of this schema. The message gives the place as a dotted path.

    Attributes:
        path: The place in the document, such as ``entries[3].config.hints.num_ctas``; empty for the whole.
        problem: What was found and what was expected.
    """

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{problem} (at {path})" if path else problem)
        self.problem = problem
        self.path = path


class NewerSchemaError(TableError):
    """A table was written by a later release of aot_tune."""


class StoreError(AotTuneError):
    """A folder or file of tables cannot be read or written; the message names the path and next step."""


class TuneError(AotTuneError):
    """A sweep cannot start, go on or publish; the message gives reason and next step (exit code 1)."""


class JournalMismatchError(TuneError):
    """A sweep's journal was made under other conditions: the driver, compiler, source or GPU changed."""


class LaunchError(AotTuneError):
    """A call cannot be launched; the message names the argument and what to pass instead."""


class MissError(LaunchError):
    """A miss where AOT_TUNE_ON_MISS=error: no table answers, or code would be compiled after `prime`."""


class CutileError(AotTuneError):
    """cuTile cannot meet a request in this installation: a version, the compiler or a symbol prevents it."""


class CompilerMissingError(CutileError):
    """A kernel would have to be compiled where no compiler is installed."""


class ArchiveError(AotTuneError):
    """A file is not an archive of cubins, or is damaged; the message names the place in it."""


class NotRecordableError(AotTuneError):
    """A library's search cannot be identified; the message names the part that prevents it."""


class UnspelledError(NotRecordableError):
    """A config, hint or constant is of a type whose content cannot be identified."""


class AotTuneWarning(UserWarning):
    """Base of the warnings. Serving goes on after each of them."""


class TableWarning(AotTuneWarning):
    """A table was left out or is used with a reservation."""


class MissWarning(AotTuneWarning):
    """A problem has no tuned entry; the message names the command that would tune it."""


class CacheWarning(AotTuneWarning):
    """The user's cache was left out or could not be written."""


class CubinWarning(AotTuneWarning):
    """Prebuilt cubins were left out; the kernel is compiled on its first launch instead."""


class EntryPointWarning(AotTuneWarning):
    """An installed package's kernels were left out: its entry point cannot be loaded."""
