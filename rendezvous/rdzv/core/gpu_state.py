"""The GPU state reported by NVML that may explain why a worker is slow."""

from __future__ import annotations

from rdzv.core.words import counted
from rdzv.structs import struct


@struct(frozen=True)
class GpuState:
    """The state of a GPU as reported by NVML at one moment, with None for missing values."""

    uuid: str
    """The GPU's UUID, as shown by `nvidia-smi -L`."""
    clock_mhz: int | None = None
    """The clock of its streaming multiprocessors."""
    max_clock_mhz: int | None = None
    """The highest clock at which these multiprocessors can run."""
    clock_reasons: tuple[str, ...] = ()
    """The reasons why the clock is not higher, such as `hardware thermal slowdown` or `idle`."""
    uncorrected_errors: int | None = None
    """The number of uncorrected memory errors since the driver was loaded or the GPU was reset."""
    temperature_c: int | None = None
    """Its temperature in degrees Celsius."""

    @property
    def pace(self) -> float:
        """The clock as a fraction of the highest clock, or 1 if either is unknown."""
        if self.clock_mhz is None or not self.max_clock_mhz:
            return 1.0
        return self.clock_mhz / self.max_clock_mhz


def described(gpu: GpuState) -> str:
    """Describe a GPU's clock, temperature and memory errors, as far as NVML reports them.

    >>> described(GpuState("GPU-1", 600, 1980, ("hardware slowdown",), 3, 91))
    'runs at 600 of 1980 MHz (hardware slowdown), 91 °C, has 3 uncorrected errors of its memory'
    >>> described(GpuState("GPU-1", 1980, 1980, (), 0))
    'runs at 1980 of 1980 MHz'
    """
    parts = []
    if gpu.clock_mhz is not None:
        most = f" of {gpu.max_clock_mhz}" if gpu.max_clock_mhz else ""
        why = f" ({', '.join(gpu.clock_reasons)})" if gpu.clock_reasons else ""
        parts.append(f"runs at {gpu.clock_mhz}{most} MHz{why}")
    if gpu.temperature_c is not None:
        parts.append(f"{'' if parts else 'is at '}{gpu.temperature_c} °C")
    if gpu.uncorrected_errors:
        parts.append(f"has {counted(gpu.uncorrected_errors, 'uncorrected error')} of its memory")
    return ", ".join(parts)
