"""Fake GPUs, names without devices: a stand-in for NVML's Python module, for agents' tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

FOLDER = "made-up-gpus"
"""In the folder of the test. If a file `UUID is lost` exists there, NVML no longer knows this GPU;
if `UUID is used` exists, the processes listed in it compute on this GPU, which is hot and slow.
"""

_MODULE = """
import os
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(UUIDS)


def nvmlDeviceGetHandleByIndex(index):
    if os.path.exists(os.path.join(os.path.dirname(__file__), f"{UUIDS[index]} is lost")):
        raise NVMLError("GPU is lost")
    return UUIDS[index]


def nvmlDeviceGetUUID(handle):
    return handle


def nvmlDeviceGetName(handle):
    return "made up"


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=1 << 30, used=0)


def nvmlDeviceGetMigMode(handle):
    raise NVMLError("not supported")


NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0


def nvmlDeviceGetComputeRunningProcesses(handle):
    try:
        with open(os.path.join(os.path.dirname(__file__), f"{handle} is used")) as file:
            return [SimpleNamespace(pid=int(pid)) for pid in file.read().split()]
    except FileNotFoundError:
        return []


def nvmlDeviceGetClockInfo(handle, kind):
    return 600 if nvmlDeviceGetComputeRunningProcesses(handle) else 1980


def nvmlDeviceGetMaxClockInfo(handle, kind):
    return 1980


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return 0x48 if nvmlDeviceGetComputeRunningProcesses(handle) else 1


def nvmlDeviceGetTotalEccErrors(handle, kind, since):
    return 3


def nvmlDeviceGetTemperature(handle, sensor):
    return 91
"""


def environ_with_gpus(folder: Path, uuids: Sequence[str]) -> dict[str, str]:
    """Return the environment in which an agent sees these GPUs; jobs do not get it."""
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    (place / "pynvml.py").write_text(f"UUIDS = {list(uuids)!r}\n{_MODULE}")
    return {"PYTHONPATH": str(place)}
