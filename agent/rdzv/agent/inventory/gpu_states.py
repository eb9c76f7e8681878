"""The state of this node's GPUs according to NVML: clocks, clock reasons, errors, temperature."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rdzv.agent.inventory.resources import parts_of
from rdzv.core.gpu_state import GpuState
from rdzv.structs import struct

CLOCK_REASONS = {
    0x1: "idle",
    0x2: "set application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "set display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
"""The bits of NVML's `nvmlClocksEventReasons`, formerly `nvmlClocksThrottleReasons`."""

_T = TypeVar("_T")


@struct(frozen=True)
class UsedGpu:
    """A GPU, or a MIG device with its GPU's clocks, and the processes that use it."""

    state: GpuState
    pids: tuple[int, ...] | None
    """The pids of processes that compute on it, or None if NVML does not report them."""


def look_at_gpus() -> tuple[UsedGpu, ...]:
    """Return the GPUs that respond, in NVML order, or an empty tuple if NVML cannot be queried.

    Makes about ten driver calls per GPU, and hangs if the driver does.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return ()
    except nvml.NVMLError:
        return ()
    try:
        return tuple(_each(nvml))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _each(nvml: Any) -> list[UsedGpu]:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        # A GPU that has fallen off the bus does not even report its name.
        with suppress(nvml.NVMLError):
            whole = nvml.nvmlDeviceGetHandleByIndex(index)
            found += [_gpu(nvml, whole, part) for part in parts_of(nvml, whole)]
    return found


def _gpu(nvml: Any, whole: Any, part: Any) -> UsedGpu:
    def ask(question: Callable[..., _T], *args: int) -> _T | None:
        with suppress(nvml.NVMLError):
            return question(whole, *args)
        return None

    state = GpuState(
        uuid=nvml.nvmlDeviceGetUUID(part),
        clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        max_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        clock_reasons=_names(_clock_reasons(nvml, whole)),
        uncorrected_errors=ask(
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    )
    return UsedGpu(state, _pids(nvml, part))


def _clock_reasons(nvml: Any, gpu: Any) -> int:
    # Older drivers know only the second name.
    for name in ("Event", "Throttle"):
        with suppress(nvml.NVMLError):
            return int(getattr(nvml, f"nvmlDeviceGetCurrentClocks{name}Reasons")(gpu))
    return 0


def _names(reasons: int) -> tuple[str, ...]:
    """Return the names of the clock reasons in a bit mask.

    >>> _names(0x48)
    ('hardware slowdown', 'hardware thermal slowdown')
    """
    return tuple(name for bit, name in CLOCK_REASONS.items() if reasons & bit)


def _pids(nvml: Any, part: Any) -> tuple[int, ...] | None:
    with suppress(nvml.NVMLError):
        processes: Sequence[Any] = nvml.nvmlDeviceGetComputeRunningProcesses(part)
        return tuple(int(one.pid) for one in processes)
    return None
