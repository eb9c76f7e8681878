"""Known final messages of NCCL, CUDA and torch, with their meanings."""

from __future__ import annotations

import re
from collections.abc import Callable, Container

from rdzv.transport.endpoints import is_loopback

ENLARGE_SHM = (
    "enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory), or use fewer "
    "DataLoader workers"
)
_SHM_FULL = f"/dev/shm is full: {ENLARGE_SHM}"

KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"creating shared memory segment /dev/shm/nccl-|failed to extend /dev/shm/nccl-",
        f"NCCL cannot make its shared memory; {_SHM_FULL}",
        "NCCL: src/misc/shmutils.cc",
    ),
    (
        r"DataLoader worker \(pid.*\) is killed by signal: Bus error"
        r"|unable to (?:write to file|mmap \d+ bytes from file|allocate shared memory)",
        f"a DataLoader worker found no shared memory; {_SHM_FULL}",
        "torch: c10/../aten/src/ATen/MapAllocator.cpp, torch/utils/data/_utils/signal_handling.py",
    ),
    (
        r"DataLoader worker \(pid\(?s?\)?.*\) (?:is killed by signal: Killed|exited unexpectedly)",
        "a DataLoader worker was killed, often because memory ran out: each worker holds "
        "its own copy of the dataset's data",
        "torch: torch/utils/data/dataloader.py, DataLoader.cpp",
    ),
    (
        r"uncorrectable ECC error encountered",
        "the GPU's memory is damaged (an uncorrectable ECC error): drain the node and reset or "
        "replace the GPU",
        "CUDA: cudaErrorECCUncorrectable",
    ),
    (
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is used up: make the batch smaller, or look for other processes on the "
        "GPU with nvidia-smi",
        "torch: c10/cuda/CUDACachingAllocator.cpp; CUDA: cudaErrorMemoryAllocation",
    ),
    (
        r"device-side assert triggered",
        "a CUDA kernel found an invalid value, most often an index or a label out of range; "
        "CUDA_LAUNCH_BLOCKING=1 shows the line",
        "CUDA: cudaErrorAssert",
    ),
    (
        r"an illegal memory access was encountered|unspecified launch failure|misaligned address",
        "a CUDA kernel accessed memory that does not belong to it: a bug in a kernel, or "
        "a failing GPU; see Xid errors in `rdzvctl nodes`",
        "CUDA: cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorMisalignedAddress",
    ),
    (
        r"CUDA driver version is insufficient|no kernel image is available",
        "this build of torch does not fit the node's GPU or its driver",
        "CUDA: cudaErrorInsufficientDriver, cudaErrorNoKernelImageForDevice",
    ),
    (
        r"Timed out waiting \d+ms for (?:recv|send) operation",
        "a collective of gloo timed out because some rank did not enter or finish it: that rank is "
        "the one to look at, not this one",
        "gloo: gloo/transport/tcp/unbound_buffer.cc",
    ),
    (
        r"Watchdog caught collective operation timeout",
        "NCCL's watchdog waited for a collective that some rank did not enter or finish: that "
        "rank is the one to look at, not this one",
        "torch: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
    ),
    (
        r"NET/IB ?: Got completion from peer .*(?:error 12|status=12|IBV_WC_RETRY_EXC_ERR)",
        "the InfiniBand peer did not answer: its process or node is gone, or the link is down",
        "NCCL: src/transport/net_ib.cc",
    ),
    (
        r"ncclSystemError: ",
        "a system call of NCCL failed; NCCL_DEBUG=WARN names it",
        "torch: torch/csrc/distributed/c10d/NCCLUtils.cpp",
    ),
    (
        r"std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough memory)",
        "this process could not allocate memory: the machine's memory, or the process's "
        "limit (ulimit -v), is used up",
        "C++ standard library; torch: c10/core/impl/alloc_cpu.cpp",
    ),
    (
        r"Too many open files",
        "this process has too many open files: raise its limit (ulimit -n; systemd: LimitNOFILE=)",
        "Linux: EMFILE",
    ),
    (
        r"No module named 'rdzv(?:\.worker)?'",
        "the interpreter that runs the script has no rdzv.worker: install the wheel rdzv_worker "
        "there (in a checkout: pip install ./worker)",
        "the wheel rdzv_worker",
    ),
    (
        r"No module named 'torch'",
        "the interpreter that runs the script has no torch: install it there, or name another "
        "interpreter in PYTHON_EXEC",
        "torch",
    ),
    (
        r"terminate called without an active exception",
        "the process ended while library threads were still running; if this happened at "
        "the end of the script, call torch.distributed.destroy_process_group() there "
        "(docs/torchrun.md)",
        "C++ standard library: a thread that was not joined",
    ),
)
"""Regular expressions of what libraries write before a worker dies, with their meanings and the
source files that write them.

Causes come before the messages that follow from them. Lost connections to peers are not listed,
because the server distinguishes causes from consequences (`rdzv.core.root_cause`).
"""


_UNREACHED_PEER = re.compile(
    r"gloo/transport/tcp/[^\n]*\] [^\n]*\bconnect(?:ing)?\b[^\n]*\[([\da-fA-F.:]+)\]:\d"
)
"""gloo/transport/tcp/pair.cc: `timed out connecting: SO_ERROR: ..., remote=[ADDRESS]:PORT`."""


def explain_peer_address(text: str, own: Callable[[], Container[str]]) -> str:
    """Say so if gloo did not reach a peer at an address of this machine, one of `own()`."""
    found = _UNREACHED_PEER.search(text)
    if found is None:
        return ""
    address = found[1]
    if is_loopback(address):
        what = "is loopback"
    elif address in own():
        what = "is an address of this machine itself"
    else:
        return ""
    return (
        f"{address} {what}, so no peer on another machine is reached there: if it is on another, "
        "gloo uses the wrong interface of that one; set GLOO_SOCKET_IFNAME there to the right one, "
        "or set neither it nor NCCL_SOCKET_IFNAME and give --local-addr "
        "(docs/troubleshooting.md)"
    )


def explain_last_words(text: str) -> str:
    """Return the meaning of the first known message in the text, or "" if there is none.

    >>> explain_last_words("RuntimeError: CUDA error: device-side assert triggered")[:46]
    'a CUDA kernel found an invalid value, most oft'
    """
    return next((meaning for pattern, meaning, _ in KNOWN if re.search(pattern, text)), "")
