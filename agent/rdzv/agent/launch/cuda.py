"""Lists the CUDA driver's GPUs from a separate process: `python -I -S cuda.py LIBRARY`.

In that process, the driver sees the job's environment, and its threads, open device files and
crashes do not affect the agent. The file is run by path and uses only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

_CUDA_ERROR_NO_DEVICE = 100
_MAX_ADDRESS_BYTES = 32


class _CudaError(Exception):
    """Raised if the CUDA driver returns an error."""


def cuda_gpus(driver: Any) -> list[str]:
    """Return the PCI addresses of the GPUs that the CUDA driver API shows to this process.

    No context is created, so no GPU memory is used, and GPUs in exclusive use are also listed.
    """

    def call(name: str, *args: object) -> int:
        code = int(getattr(driver, name)(*args))
        if code not in (0, _CUDA_ERROR_NO_DEVICE):
            text = ctypes.c_char_p()
            driver.cuGetErrorString(code, ctypes.byref(text))
            raise _CudaError(f"{name}: {(text.value or b'unknown').decode()} (error {code})")
        return code

    if call("cuInit", 0) == _CUDA_ERROR_NO_DEVICE:
        return []
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    addresses: list[str] = []
    for index in range(count.value):
        device = ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), index)
        address = ctypes.create_string_buffer(_MAX_ADDRESS_BYTES)
        call("cuDeviceGetPCIBusId", address, _MAX_ADDRESS_BYTES, device)
        addresses.append(address.value.decode())
    return addresses


def print_cuda_gpus(library: str) -> None:
    answer: dict[str, Any] = {"gpus": [], "why_none": "", "failure": ""}
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # Keeps the driver's own output separate from the result.
        try:
            answer["gpus"] = cuda_gpus(ctypes.CDLL(library))
        except OSError as error:
            answer["why_none"] = f"the CUDA driver cannot be loaded ({error})"
        except (_CudaError, AttributeError) as error:
            answer["failure"] = f"{library}: {error}"
        out.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    print_cuda_gpus(sys.argv[1])
