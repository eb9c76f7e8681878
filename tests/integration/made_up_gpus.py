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
"""


def environ_with_gpus(folder: Path, uuids: Sequence[str]) -> dict[str, str]:
    """Return the environment in which an agent sees these GPUs; jobs do not get it."""
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    (place / "pynvml.py").write_text(f"UUIDS = {list(uuids)!r}\n{_MODULE}")
    return {"PYTHONPATH": str(place)}
