"""Messages between the driver and a GPU's host, as values. Ray carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aot_tune.errors import AotTuneError, DeclarationError, StoreError, TuneError, UsageError
from aot_tune.tuner.measure.blame import Known
from aot_tune.tuner.measure.request import Reported, Request, Spent
from aot_tune.tuner.measure.supervise import GpuLostError, ProblemFailedError
from aot_tune.values.config import Config
from aot_tune.values.problem import Problem

_KINDS: dict[str, type[AotTuneError]] = {
    kind.__name__: kind for kind in (GpuLostError, DeclarationError, StoreError, UsageError, TuneError)
}
"""The errors that arrive with their own type; another error arrives as its nearest base of these."""


@dataclass(frozen=True, kw_only=True)
class RemoteGpu:
    """A GPU of a node, as NVML describes it."""

    name: str
    """The product's name; empty where NVML does not answer."""

    arch: str
    """Its arch, ``sm90``; empty where it is unknown."""

    uuid: str
    """NVML's identifier."""

    driver: str
    """The driver's version."""


@dataclass(frozen=True, kw_only=True)
class RemoteRequest:
    """A request in the form that is sent to a host."""

    request: Request
    """The request without its configs."""

    digests: Mapping[Config, str | None]
    """Its configs, each with the digest of its cubin; None without a cubin."""

    known: Known
    """The faults of the kernel's configs so far, on all GPUs."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A line for the user."""

    line: str
    """The line."""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An error of aot_tune that ended a request."""

    kind: str
    """The name of its type, one of `_KINDS`, or of `ProblemFailedError`."""

    text: str
    """Its message; of a `ProblemFailedError` the reason."""

    problem: Problem | None = None
    """The problem of a `ProblemFailedError`."""

    @classmethod
    def of(cls, error: AotTuneError) -> Raised:
        """Return the error as a value, since not every exception can be pickled."""
        if isinstance(error, ProblemFailedError):
            return cls(kind=ProblemFailedError.__name__, text=error.reason, problem=error.problem)
        kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), "TuneError")
        return cls(kind=kind, text=str(error))

    def error(self) -> AotTuneError:
        """Convert the value to an error."""
        if self.problem is not None:
            return ProblemFailedError(self.problem, self.text)
        return _KINDS[self.kind](self.text)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The end of a request."""

    value: object = None
    """Its result."""

    error: Raised | None = None
    """Its error; None where it returned."""

    stopped: bool = False
    """Whether it was interrupted."""

    notes: tuple[str, ...] = ()
    """Lines for the user that were not sent before."""

    spent: Spent = field(default_factory=Spent)
    """Time spent on it."""

    known: Known = field(default_factory=Known)
    """The faults of the kernel's configs that the host knows at its end."""


Event = Reported | Noted | Reply
