"""Print choices on request; warn once of each miss and each stale table. Chooses nothing."""

from __future__ import annotations

import sys
from contextlib import suppress

from aot_tune import environment
from aot_tune.choose.choice import Choice, miss_message
from aot_tune.choose.index import Index
from aot_tune.declare.declaration import Declaration
from aot_tune.errors import CubinWarning, MissWarning, TableWarning
from aot_tune.nvidia import cutile
from aot_tune.serve.kernels import Cubins
from aot_tune.serve.loader import folders
from aot_tune.serve.missed import note
from aot_tune.serve.rank import rank_in_words
from aot_tune.tables.gpu_models import measured_on, other_gpu_model
from aot_tune.values.arch import Arch
from aot_tune.values.device import Device
from aot_tune.values.problem import Problem
from aot_tune.warn import warn

_MOST_WARNINGS = 32
"""Most misses of a declaration that warnings name; all further misses share one warning."""

_WARNED_MODELS: set[tuple[str, str]] = set()
"""Pairs of a table's GPU model and this machine's that this process has warned of, for all declarations."""

_RANK_REPORTED: list[str] = []
"""What makes this process a rank, once its first miss has reported it."""


class Messages:
    """Messages about a declaration, each given once."""

    def __init__(self, tunable: Declaration) -> None:
        self._tunable = tunable
        self._checked: set[Arch] = set()
        self._warned: set[Problem] = set()
        self._passed_over = False
        self._uncompiled = False

    def source(self, device: Device, index: Index, cubins: Cubins) -> None:
        """Warn once of tables tuned for other source, another compiler's code, or another GPU model.

        This is not done at import, because hashing takes milliseconds.
        """
        arch = device.arch
        if arch in self._checked or not index.tables:
            return
        self._checked.add(arch)
        for made, message in gpu_model_messages(index, device.name):
            if (made, device.name) not in _WARNED_MODELS:
                _WARNED_MODELS.add((made, device.name))
                warn(message, TableWarning)
        now = cubins.source_hash(arch)
        if now is None:
            from aot_tune.declare.fingerprint.hashing import source_hash

            now = source_hash(self._tunable)
        for message in (
            *stale_messages(self._tunable, arch, index, now),
            *compiler_messages(self._tunable, arch, index, cubins.compiler(arch)),
        ):
            warn(message, TableWarning)

    def missed(self, arch: Arch, problem: Problem) -> None:
        """Append a problem that missed to the file of AOT_TUNE_RECORD."""
        note({"kernel": self._tunable.name, "arch": str(arch), "problem": dict(problem)})

    def uncompiled(self, arch: Arch, problem: Problem, choice: Choice) -> None:
        """Warn once that another config runs because the choice has no code; print it for AOT_TUNE_LOG."""
        self._print(arch, problem, choice)
        if not self._uncompiled:
            self._uncompiled = True
            warn(
                f"{self._tunable.name} {problem} on {arch}: {choice.reason}; {choice.config} "
                f"runs: make the cubins with these tables, aot-tune compile --arch {arch}"
                f"{self._tunable.module_option}, or pass contiguous tensors",
                CubinWarning,
            )

    def _print(self, arch: Arch, problem: Problem, choice: Choice) -> None:
        if environment.logs_choices():
            subject = f"{self._tunable.name} {problem} on {arch}"
            _write(f"aot_tune: {subject}: {choice.config} ({choice.source}: {choice.reason})\n")

    def choice(self, arch: Arch, problem: Problem, choice: Choice) -> None:
        """Print a new choice for AOT_TUNE_LOG, and warn once of a miss."""
        self._print(arch, problem, choice)
        if not self._passed_over and (message := passed_over_message(self._tunable, arch, problem, choice)):
            self._passed_over = True
            warn(message, TableWarning)
        if not choice.missed:
            return
        self.missed(arch, problem)
        if problem in self._warned or len(self._warned) > _MOST_WARNINGS:
            return
        self._warned.add(problem)
        if len(self._warned) <= _MOST_WARNINGS:
            places = [folder for folder, _ in folders(self._tunable)]
            message = miss_message(self._tunable, arch, problem, choice, places)
            if (rank := rank_in_words()) and not _RANK_REPORTED:
                _RANK_REPORTED.append(rank)
                message = f"{message}; {rank}"
            warn(message, MissWarning)
        else:
            warn(
                f"{self._tunable.name} met more than {_MOST_WARNINGS} problems that nothing was tuned for; "
                f"further ones are printed only with {environment.LOG}=1",
                MissWarning,
            )


def stale_messages(tunable: Declaration, arch: Arch, index: Index, now: str) -> list[str]:
    """Return a message for each table tuned for source with another hash than the current, `now`."""
    return [
        f"{path} was tuned for other source of {tunable.name} ({table.source_hash}, now "
        f"{now}); it is used because the kernel's constants still match; {_again(tunable, arch)}"
        for path, table in index.tables.items()
        if table.source_hash != now
    ]


def gpu_model_messages(index: Index, here: str) -> list[tuple[str, str]]:
    """Return the other GPU models that tables were measured on, each with a sentence.

    Args:
        index: The kernel's tables.
        here: The name of this machine's GPU model.
    """
    models = measured_on(index.tables.values())
    return [(made, message) for made in models if (message := other_gpu_model(made, here))]


def compiler_messages(tunable: Declaration, arch: Arch, index: Index, here: str | None) -> list[str]:
    """Return a message for each table that was timed with another compiler's code than this machine runs.

    Args:
        tunable: The kernel's declaration.
        arch: The arch of the GPU.
        index: The kernel's tables.
        here: The version of the compiler of the running code; None where it is not known.
    """
    messages = []
    for path, table in index.tables.items():
        made = table.built_with
        if here is None or here == made.tileiras:
            continue
        release = cutile.version()
        more = (
            "" if made.cuda_tile == release else f", and cuda-tile is {release} in place of {made.cuda_tile}"
        )
        messages.append(
            f"{path} holds the times of code that tileiras {made.tileiras} compiled, and "
            f"{tunable.name} runs code of tileiras {here} here{more}; its choices are used, and may not be "
            f"the fastest: install tileiras {made.tileiras}, or {_again(tunable, arch)}"
        )
    return messages


def passed_over_message(tunable: Declaration, arch: Arch, problem: Problem, choice: Choice) -> str | None:
    """Return a message where the winner of the problem's own bucket may run on no GPU of the arch."""
    entry = choice.entry
    if entry is None or entry.bucket != problem or choice.config == entry.config:
        return None
    if entry.config not in tunable.declared_space(arch, problem):
        return None  # `legal` may not be called with it; the loader has warned that it is left out
    reason = tunable.refusal(entry.config, arch, problem)
    if reason is None:  # it does not fit this GPU, or another config loads less on this GPU model
        return None
    return (
        f"{tunable.name} {problem} on {arch}: its table's winner, {entry.config}, may not run: {reason}; "
        f"{choice.config} does; {_again(tunable, arch)}"
    )


def _again(tunable: Declaration, arch: Arch) -> str:
    return f"tune again: aot-tune tune {tunable.name} --arch {arch}{tunable.module_option}"


def _write(line: str) -> None:
    """Write to stderr, if possible: stderr may be None, closed or a full disk."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(line)
