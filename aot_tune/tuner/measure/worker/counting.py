"""The real backend of profiles: reads the GPU's counters too. Only a measuring worker imports this module."""

from __future__ import annotations

import torch

from aot_tune.nvidia.cupti import CountersError, Cupti
from aot_tune.tuner.measure.worker.backend import Counters, Trial
from aot_tune.tuner.measure.worker.gpu import GpuBackend


class CountingBackend(GpuBackend):
    """A `Backend` on a GPU whose counters are read."""

    def counters(self, trial: Trial) -> Counters:
        """Read the GPU's counters of one launch on the first seed's renewed arguments."""
        case = self._cases[0]
        self._launch_prepared(trial, case)  # loads the kernel

        def prepare() -> None:
            case.renew()
            self._round.flush()
            torch.cuda.synchronize()

        def launch() -> None:
            self._launch(trial, case)
            torch.cuda.synchronize()

        try:
            read = Cupti().counters(launch, prepare, self._torch_device.index)
        except CountersError as error:
            return Counters(refusal=str(error))
        return Counters(values=read.values, passes=read.passes)
