"""Read GPU counters of one launch, by CUPTI's range profiler through ctypes. No compiler, no Nsight.

The structures are those of the headers ``cupti_range_profiler.h``, ``cupti_profiler_host.h`` and
``cupti_profiler_target.h`` of release 13.0; later releases append fields. Each launch is a range of its own
(auto range), and CUPTI repeats the kernel for each pass (kernel replay): user ranges would count the idle
time around the launch too. That needs root, CAP_SYS_ADMIN or a driver that admits all users.
"""

from __future__ import annotations

import ctypes as c
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot_tune.errors import TuneError

METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__cycles_active.avg",
    "sm__cycles_active.max",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_pipe_lsu_wavefronts.sum",
    "smsp__inst_executed_op_local_st.sum",
    "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct",
    "smsp__warp_issue_stalled_barrier_per_warp_active.pct",
    "smsp__warp_issue_stalled_gmma_per_warp_active.pct",
    "smsp__warp_issue_stalled_math_pipe_throttle_per_warp_active.pct",
    "smsp__warp_issue_stalled_wait_per_warp_active.pct",
)
"""The counters. A GPU lacks some of them; a GH100 reads all in a few passes."""

MOST_RANGES = 64
"""Most sessions of one launch; kernel replay needs one."""

_NO_PRIVILEGES = (35, 40)
"""CUPTI_ERROR_INSUFFICIENT_PRIVILEGES, and its form for virtual devices."""

_AUTO_RANGE, _KERNEL_REPLAY = 1, 2

_Size, _Pointer, _Text = c.c_size_t, c.c_void_p, c.c_char_p


def _struct(name: str, *fields: tuple[str, Any]) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": [("structSize", _Size), ("pPriv", _Pointer), *fields]})


_HOST, _OBJECT = ("pHostObject", _Pointer), ("pRangeProfilerObject", _Pointer)
_NAMES = (("metricNames", c.POINTER(_Text)), ("numMetrics", _Size))

STRUCTS = {
    "CUpti_Profiler_Initialize_Params": _struct("Initialize"),
    "CUpti_Device_GetChipName_Params": _struct("Chip", ("deviceIndex", _Size), ("pChipName", _Text)),
    "CUpti_Profiler_GetCounterAvailability_Params": _struct(
        "Available", ("ctx", _Pointer), ("counterAvailabilityImageSize", _Size), ("pImage", _Pointer)
    ),
    "CUpti_Profiler_Host_Initialize_Params": _struct(
        "Host", ("profilerType", c.c_int), ("pChipName", _Text), ("pImage", _Pointer), _HOST
    ),
    "CUpti_Profiler_Host_Deinitialize_Params": _struct("HostEnd", _HOST),
    "CUpti_Profiler_Host_ConfigAddMetrics_Params": _struct("Add", _HOST, *_NAMES),
    "CUpti_Profiler_Host_GetConfigImageSize_Params": _struct("ConfigSize", _HOST, ("configImageSize", _Size)),
    "CUpti_Profiler_Host_GetConfigImage_Params": _struct(
        "Config", _HOST, ("configImageSize", _Size), ("pConfigImage", _Pointer)
    ),
    "CUpti_Profiler_Host_GetNumOfPasses_Params": _struct(
        "Passes", ("configImageSize", _Size), ("pConfigImage", _Pointer), ("numOfPasses", _Size)
    ),
    "CUpti_RangeProfiler_Enable_Params": _struct("Enable", ("ctx", _Pointer), _OBJECT),
    "CUpti_RangeProfiler_Disable_Params": _struct("Disable", _OBJECT),
    "CUpti_RangeProfiler_Start_Params": _struct("Start", _OBJECT),
    "CUpti_RangeProfiler_GetCounterDataSize_Params": _struct(
        "DataSize",
        _OBJECT,
        ("pMetricNames", c.POINTER(_Text)),
        ("numMetrics", _Size),
        ("maxNumOfRanges", _Size),
        ("maxNumRangeTreeNodes", c.c_uint32),
        ("counterDataSize", _Size),
    ),
    "CUpti_RangeProfiler_CounterDataImage_Initialize_Params": _struct(
        "DataStart", _OBJECT, ("counterDataSize", _Size), ("pCounterData", _Pointer)
    ),
    "CUpti_RangeProfiler_SetConfig_Params": _struct(
        "SetConfig",
        _OBJECT,
        ("configSize", _Size),
        ("pConfig", _Pointer),
        ("counterDataImageSize", _Size),
        ("pCounterDataImage", _Pointer),
        ("range", c.c_int),
        ("replayMode", c.c_int),
        ("maxRangesPerPass", _Size),
        ("numNestingLevels", c.c_uint16),
        ("minNestingLevel", c.c_uint16),
        ("passIndex", _Size),
        ("targetNestingLevel", c.c_uint16),
    ),
    "CUpti_RangeProfiler_Stop_Params": _struct(
        "Stop",
        _OBJECT,
        ("passIndex", _Size),
        ("targetNestingLevel", _Size),
        ("isAllPassSubmitted", c.c_uint8),
    ),
    "CUpti_RangeProfiler_DecodeData_Params": _struct("Decode", _OBJECT, ("numOfRangeDropped", _Size)),
    "CUpti_RangeProfiler_GetCounterDataInfo_Params": _struct(
        "Info", ("pCounterDataImage", _Pointer), ("counterDataImageSize", _Size), ("numTotalRanges", _Size)
    ),
    "CUpti_Profiler_Host_EvaluateToGpuValues_Params": _struct(
        "Evaluate",
        _HOST,
        ("pCounterDataImage", _Pointer),
        ("counterDataImageSize", _Size),
        ("rangeIndex", _Size),
        ("ppMetricNames", c.POINTER(_Text)),
        ("numMetrics", _Size),
        ("pMetricValues", c.POINTER(c.c_double)),
    ),
}
"""The functions' parameters, by the name of their type in the headers."""


class CountersError(TuneError):
    """The counters cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """Counters of one launch."""

    values: Mapping[str, float]
    """Value of each metric that the GPU has."""

    passes: int
    """Number of times that the kernel ran for them."""

    version: int
    """Version of CUPTI's interface."""


def size_of(params: type[c.Structure]) -> int:
    """Return a structure's size as CUPTI computes it: up to the end of its last field, without padding."""
    last = getattr(params, params._fields_[-1][0])
    return int(last.offset + last.size)


class Cupti:
    """CUPTI's library.

    Raises:
        CountersError: It is not installed.
    """

    def __init__(self) -> None:
        place = next(filter(os.path.exists, _places()), None)
        if place is None:
            raise CountersError("libcupti is not installed; pip install nvidia-cuda-cupti")
        try:
            for name in (
                "libnvperf_target.so",
                "libnvperf_host.so",
            ):  # libcupti opens them by their bare names
                if (part := Path(place).with_name(name)).exists():
                    c.CDLL(str(part), mode=c.RTLD_GLOBAL)
            self._library = c.CDLL(place)
        except OSError as error:
            raise CountersError(f"{place} cannot be loaded: {error}") from error

    def counters(self, launch: Callable[[], None], prepare: Callable[[], None], device: int) -> Read:
        """Read the counters of one launch on the current context's device.

        Args:
            launch: Launches the kernel once, and waits for its end.
            prepare: Brings memory and caches into the state before a launch.
            device: The GPU's index as CUDA counts.

        Raises:
            CountersError: They cannot be read, as without privileges.
        """
        context = _Pointer()
        if c.CDLL("libcuda.so.1").cuCtxGetCurrent(c.byref(context)) or not context.value:
            raise CountersError("this thread has no CUDA context")
        self._call("Profiler_Initialize")
        chip = self._call("Device_GetChipName", deviceIndex=device)
        host, config, passes, known = self.planned(chip.pChipName, self._available(context))
        try:
            values = self._ranged(context, host, config, known, launch, prepare)
        finally:
            self._end(host)
        version = c.c_uint32()
        self._library.cuptiGetVersion(c.byref(version))
        return Read(values=values, passes=passes, version=version.value)

    def _available(self, context: Any) -> Any:
        """Return the image of the counters that a context's device has; None where it cannot be had.

        Then all counters of the chip are taken, and what forbids them is reported later.
        """
        try:
            size = self._call("Profiler_GetCounterAvailability", ctx=context).counterAvailabilityImageSize
            image = (c.c_uint8 * size)()
            at = {"counterAvailabilityImageSize": size, "pImage": c.cast(image, _Pointer)}
            self._call("Profiler_GetCounterAvailability", ctx=context, **at)
        except CountersError:
            return None
        return image

    def planned(self, chip: bytes, available: Any = None) -> tuple[Any, Any, int, tuple[str, ...]]:
        """Return host object, config image, number of passes and known metrics of a chip; needs no GPU.

        Args:
            chip: CUPTI's name of the chip.
            available: The image of its available counters; None for all.
        """
        known = tuple(metric for metric in METRICS if self._has(chip, metric, available))
        host = self._host(chip, available)
        self._add(host, known)
        size = self._call("Profiler_Host_GetConfigImageSize", pHostObject=host).configImageSize
        image = (c.c_uint8 * size)()
        at = {"configImageSize": size, "pConfigImage": c.cast(image, _Pointer)}
        self._call(
            "Profiler_Host_GetConfigImage",
            pHostObject=host,
            **at,
        )
        passes = self._call("Profiler_Host_GetNumOfPasses", **at).numOfPasses
        return host, image, passes, known

    def _has(self, chip: bytes, metric: str, available: Any) -> bool:
        host = self._host(chip, available)
        try:
            self._add(host, [metric])
        except CountersError:
            return False
        finally:
            self._end(host)
        return True

    def _host(self, chip: bytes, available: Any) -> Any:
        image = None if available is None else c.cast(available, _Pointer)
        return self._call(
            "Profiler_Host_Initialize", profilerType=0, pChipName=chip, pImage=image
        ).pHostObject

    def _end(self, host: Any) -> None:
        self._call("Profiler_Host_Deinitialize", pHostObject=host)

    def _add(self, host: Any, metrics: Sequence[str]) -> None:
        self._call(
            "Profiler_Host_ConfigAddMetrics",
            pHostObject=host,
            metricNames=_names(metrics),
            numMetrics=len(metrics),
        )

    def _ranged(
        self,
        context: Any,
        host: Any,
        config: Any,
        known: Sequence[str],
        launch: Callable[[], None],
        prepare: Callable[[], None],
    ) -> dict[str, float]:
        """Profile one launch as an auto range, and return its values."""
        names, counted = _names(known), len(known)
        profiler = self._range("Enable", ctx=context).pRangeProfilerObject
        own = {"pRangeProfilerObject": profiler}
        try:
            size = self._range(
                "GetCounterDataSize",
                **own,
                pMetricNames=names,
                numMetrics=counted,
                maxNumOfRanges=1,
                maxNumRangeTreeNodes=1,
            ).counterDataSize
            data = (c.c_uint8 * size)()
            at = c.cast(data, _Pointer)
            self._range("CounterDataImage_Initialize", **own, counterDataSize=size, pCounterData=at)
            self._range(
                "SetConfig",
                **own,
                configSize=len(config),
                pConfig=c.cast(config, _Pointer),
                counterDataImageSize=size,
                pCounterDataImage=at,
                range=_AUTO_RANGE,
                replayMode=_KERNEL_REPLAY,
                maxRangesPerPass=1,
                numNestingLevels=1,
                minNestingLevel=1,
                targetNestingLevel=1,
            )
            for _ in range(MOST_RANGES):
                prepare()
                self._range("Start", **own)
                launch()
                if self._range("Stop", **own).isAllPassSubmitted:
                    break
            dropped = self._range("DecodeData", **own).numOfRangeDropped
            image = {"pCounterDataImage": at, "counterDataImageSize": size}
            ranges = self._range("GetCounterDataInfo", **image).numTotalRanges
            if dropped or ranges != 1:
                raise CountersError(f"CUPTI kept {ranges} ranges of one launch and dropped {dropped}")
            values = (c.c_double * counted)()
            self._call(
                "Profiler_Host_EvaluateToGpuValues",
                pHostObject=host,
                **image,
                rangeIndex=0,
                ppMetricNames=names,
                numMetrics=counted,
                pMetricValues=values,
            )
        finally:
            self._range("Disable", **own)
        return {name: value for name, value in zip(known, values, strict=True) if math.isfinite(value)}

    def _range(self, name: str, **values: Any) -> Any:
        return self._call(f"RangeProfiler_{name}", **values)

    def _call(self, name: str, **values: Any) -> Any:
        """Call a function with its parameters, and return them with its results."""
        params, function = STRUCTS[f"CUpti_{name}_Params"], f"cupti{name.replace('_', '')}"
        made = params(structSize=size_of(params), **values)
        code = getattr(self._library, function)(c.byref(made))
        if code:
            text = _Text()
            self._library.cuptiGetResultString(code, c.byref(text))
            raise CountersError(f"{function}: error {code} {(text.value or b'').decode()}{_hint(code)}")
        return made


def _hint(code: int) -> str:
    if code not in _NO_PRIVILEGES:
        return ""
    return " (needs root, CAP_SYS_ADMIN, or the driver's option NVreg_RestrictProfilingToAdminUsers=0)"


def _names(metrics: Sequence[str]) -> Any:
    return (_Text * len(metrics))(*[metric.encode() for metric in metrics])


def _places() -> Iterator[str]:
    """Yield the paths where libcupti may be: of the pip packages, then of the toolkits."""
    for folder in map(Path, sys.path):
        for package in ("cu13", "cuda_cupti"):
            yield from map(str, sorted(folder.glob(f"nvidia/{package}/lib/libcupti.so.*")))
    for toolkit in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        yield from (f"{toolkit}/extras/CUPTI/lib64/libcupti.so", f"{toolkit}/lib64/libcupti.so")
        yield from map(str, sorted(toolkit.glob("lib/libcupti.so.*")))
