"""NVML is queried for each GPU separately; values it does not provide are left out."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rdzv.agent.inventory.gpu_states import CLOCK_REASONS, UsedGpu, look_at_gpus
from rdzv.core.gpu_state import GpuState


class Nvml(SimpleNamespace):
    """A fake module `pynvml` with two GPUs, one partitioned and one lost."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        """NVML's only error type."""

    def refused(self, *_args: object) -> Any:
        raise self.NVMLError("not supported")

    def gpu(self, index: int) -> str:
        return self.refused() if index == 1 else ("whole", "", "divided")[index]

    def mig_device(self, _gpu: str, index: int) -> str:
        return "part" if index == 1 else self.refused()


def nvml(**changes: Any) -> Nvml:
    made = Nvml()
    known: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": made.gpu,
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
        "nvmlDeviceGetMigMode": lambda gpu: [gpu == "divided", 0],
        "nvmlDeviceGetMaxMigDeviceCount": lambda _gpu: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": made.mig_device,
        # NVML knows no clocks of a partition.
        "nvmlDeviceGetClockInfo": lambda gpu, _kind: {"whole": 600, "divided": 1_200}[gpu],
        "nvmlDeviceGetMaxClockInfo": lambda _gpu, _kind: 1_980,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 0x48 if gpu == "whole" else 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": made.refused,
        "nvmlDeviceGetTotalEccErrors": lambda _gpu, _kind, _since: 3,
        "nvmlDeviceGetTemperature": lambda _gpu, _sensor: 91,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: (
            [SimpleNamespace(pid=50)] if gpu == "part" else []
        ),
    }
    vars(made).update(known | changes)
    return made


def look(monkeypatch: pytest.MonkeyPatch, module: Nvml | None) -> tuple[UsedGpu, ...]:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return look_at_gpus()


def test_what_nvml_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ("hardware slowdown", "hardware thermal slowdown")
    assert look(monkeypatch, nvml()) == (
        UsedGpu(GpuState("GPU-whole", 600, 1_980, reasons, 3, 91), ()),
        UsedGpu(GpuState("GPU-part", 1_200, 1_980, (), 3, 91), (50,)),
    )


def test_what_it_does_not_show_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        *("ClockInfo", "MaxClockInfo", "CurrentClocksEventReasons", "TotalEccErrors"),
        *("Temperature", "ComputeRunningProcesses", "MigMode"),
    )
    refused = nvml()
    vars(refused).update({f"nvmlDeviceGet{name}": refused.refused for name in names})
    assert look(monkeypatch, refused) == (
        UsedGpu(GpuState("GPU-whole"), None),
        UsedGpu(GpuState("GPU-divided"), None),
    )


def test_an_older_driver_knows_the_reasons_by_their_former_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = nvml(nvmlDeviceGetCurrentClocksThrottleReasons=lambda _gpu: 0x4)
    older.nvmlDeviceGetCurrentClocksEventReasons = older.refused
    assert look(monkeypatch, older)[0].state.clock_reasons == ("software power cap",)


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetCount"])
def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert look(monkeypatch, None) == ()
    refused = nvml()
    setattr(refused, name, refused.refused)
    assert look(monkeypatch, refused) == ()


def test_the_reasons_are_those_of_nvml() -> None:
    import pynvml

    assert sum(CLOCK_REASONS) == pynvml.nvmlClocksThrottleReasonAll
    named = {
        "idle": pynvml.nvmlClocksEventReasonGpuIdle,
        "software power cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "hardware slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
        "hardware thermal slowdown": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
        "hardware power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "software thermal slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    }
    assert {name: CLOCK_REASONS[bit] for name, bit in named.items()} == {
        name: name for name in named
    }
