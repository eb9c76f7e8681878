"""A worker that shows what a script can see or rely on: `cases.py CASE[:MODULE]`.

MODULE is imported first.

Its output is compared, line by line, between a fresh interpreter and a fork of a zygote. So it
contains nothing that would differ between two fresh interpreters.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PR_GET_PDEATHSIG = 2


def interpreter() -> None:
    """Print all that the interpreter has prepared for the script."""
    import __main__

    print("argv", sys.argv[1:], sys.orig_argv)
    print("flags", sys.flags)
    print("options", sys._xoptions, sys.warnoptions)
    print("path", sys.path, sys.executable)
    print("hook", [name for name in (*sys.modules, *sys.path_importer_cache) if "zygote" in name])
    print("sitecustomize", "sitecustomize" in sys.modules, "usercustomize" in sys.modules)
    print("main", __name__, __main__ is sys.modules["__main__"], __main__.__dict__ is globals())
    for name in ("__file__", "__spec__", "__package__", "__cached__", "__doc__", "__annotations__"):
        print(name, repr(globals().get(name, "none")))
    print("loader", type(__loader__).__name__, __builtins__)  # type: ignore[name-defined]
    print("stack")
    traceback.print_stack(file=sys.stdout)
    print("hooks", sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
    print("gc", gc.isenabled(), gc.get_threshold(), faulthandler.is_enabled())
    print("recursion", sys.getrecursionlimit(), sys.gettrace(), sys.getprofile())


def state() -> None:
    """Print what an imported module may have changed."""
    interpreter()
    process()
    warned()


def process() -> None:
    """Print everything about the process that a script can look up."""
    print("session", os.getsid(0) == os.getpid() == os.getpgid(0))
    print("cwd", Path.cwd(), oct(os.umask(0o22)), os.nice(0))
    print("cpus", sorted(os.sched_getaffinity(0)))
    print("limits", [resource.getrlimit(which) for which in range(16)])
    for signum in sorted(signal.valid_signals()):
        print(signum, signal.getsignal(signum))
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    for name in ("SigBlk", "SigPnd", "ShdPnd", "SigIgn", "SigCgt", "Name", "NoNewPrivs"):
        print(name, status[name])
    if "torch" not in sys.modules:  # The threads of numpy come back when they have work.
        print("threads", status["Threads"])
    leash = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(leash), 0, 0, 0)
    print("leash", leash.value)
    print("fds", sorted(path.name for path in Path("/proc/self/fd").iterdir()))
    print("thread", [str(thread.name) for thread in threading.enumerate()])
    print("main", threading.main_thread() is threading.current_thread())
    print("wakeup", signal.set_wakeup_fd(-1), signal.getitimer(signal.ITIMER_REAL))
    print("spent", time.process_time() < 60, os.times().children_user < 60)


def environment() -> None:
    """Print the environment, as Python, C, children and /proc see it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    print("order", [name for name in os.environ if name != "_"])
    for name, value in os.environ.items():
        print(name, ascii(value), getenv(os.fsencode(name)) == os.fsencode(value))
    for name in ("PYTHONPATH", "RDZV_ZYGOTE", "ONLY_THE_ZYGOTE"):
        print(name, getenv(name.encode()), os.environ.get(name))
    sys.stdout.flush()
    os.spawnlp(os.P_WAIT, "env", "env")
    print("proc", Path("/proc/self/environ").read_bytes().split(b"\0"))
    print("ps", Path("/proc/self/cmdline").read_bytes().split(b"\0"))


def streams() -> None:
    """Print what the standard streams are, then use them all."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        raw = getattr(stream.buffer, "raw", stream.buffer)
        print(stream.name, stream.mode, stream.encoding, stream.errors, stream.newlines)
        print(stream.line_buffering, stream.write_through, stream.isatty(), stream.seekable())
        print(stream.fileno(), type(stream.buffer), raw.mode, raw.closefd, raw.name, raw.seekable())
        print(os.fstat(stream.fileno()).st_mode, os.get_inheritable(stream.fileno()), stream.closed)
    print(sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__)
    print("\N{GREEK SMALL LETTER LAMDA}", "to stderr \udcff", file=sys.stderr)
    print("read", repr(sys.stdin.read()))
    os.write(1, b"after what print wrote, unbuffered\n")


def uncaught() -> None:
    atexit.register(print, "at exit, of the worker's own")
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("then") from error


def exit_text() -> None:
    sys.exit("a text is for stderr")


def exit_code() -> None:
    sys.exit(7)


def exit_at_once() -> None:
    atexit.register(print, "never")
    os._exit(9)


def interrupted() -> None:
    raise KeyboardInterrupt


def by_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def by_fault() -> None:
    faulthandler.enable()
    signal.raise_signal(signal.SIGABRT)


def handled() -> None:
    signal.signal(signal.SIGUSR1, lambda signum, _: print("heard", signum))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(5))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(60)


def threads() -> None:
    """Leave threads behind: one that outlives the script, one that fails."""

    def fail() -> None:
        raise RuntimeError("in a thread")

    failing = threading.Thread(target=fail, name="failing")
    failing.start()
    failing.join()
    script_is_over = threading.main_thread().join

    def go_on() -> None:
        script_is_over()
        print("after the script")

    threading.Thread(target=go_on, name="lasting").start()
    atexit.register(print, "at exit, once the threads have ended")


def warned() -> None:
    """Warn, also on behalf of missing callers."""
    for level in (1, 2, 9):
        warnings.warn(f"of level {level}", stacklevel=level)
    print(warnings.filters)
    sys.unraisablehook  # noqa: B018

    class Broken:
        def __del__(self) -> None:
            raise OSError("in a finalizer")

    Broken()


def imports() -> None:
    import beside

    print(beside.WHERE, beside.__file__)
    try:
        import nowhere_to_be_found  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        print(error)


class Point:
    """To be pickled, as a class of `__main__`."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.x + 1,)


def double(point: Point) -> tuple[int, str, bool]:
    current = multiprocessing.current_process()
    return point.x * 2, type(point).__module__, current.daemon


def processes() -> None:
    """Start processes in each of Python's ways, and share memory with one."""
    from multiprocessing import shared_memory

    current = multiprocessing.current_process()
    print(current.name, current.daemon, multiprocessing.parent_process(), len(current.authkey))
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [Point(1), Point(2)]))
            pool.close()
            pool.join()
    block = shared_memory.SharedMemory(create=True, size=16)
    block.close()
    block.unlink()
    print(multiprocessing.active_children())


def randomness() -> None:
    """Draw random numbers that differ between processes, as long as no seed is set."""
    import numpy as np
    import torch

    drawn = [random.random(), np.random.rand(), np.random.default_rng().random()]
    drawn += [torch.initial_seed(), torch.rand(1).item(), torch.Generator().initial_seed()]
    drawn += [os.urandom(4).hex(), multiprocessing.current_process().authkey.hex()]
    print(*drawn, sep="\n", file=sys.stderr)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    print("seeded", random.random(), np.random.rand(), torch.rand(1).item())


def torch_threads() -> None:
    """Compute with as many threads as this worker may have."""
    import numpy as np
    import torch

    print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_initialized())
    ones = torch.ones(700, 700)
    print((ones @ ones).sum().item(), torch.exp(ones).sum().item() > 0)
    print(np.dot(np.ones((300, 300)), np.ones((300, 300))).sum())
    print(torch.jit.fork(torch.add, torch.ones(1), 1).wait().item())
    ones.requires_grad_()
    (ones * 2).sum().backward()
    assert ones.grad is not None
    print(ones.grad.sum().item())


def loader() -> None:
    """Read a data set with workers, forked and spawned, that are classes of `__main__`."""
    import torch
    from torch.utils.data import DataLoader

    for method in ("fork", "spawn"):
        torch.manual_seed(1)
        found = DataLoader(
            Squares(),  # type: ignore[arg-type]
            batch_size=4,
            num_workers=1,
            shuffle=True,
            multiprocessing_context=method,
        )
        print(method, [batch.tolist() for batch in found])
    try:
        list(DataLoader(Broken(), num_workers=1))  # type: ignore[arg-type]
    except RuntimeError as error:
        print(error)


class Squares:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index * index


class Broken(Squares):
    def __getitem__(self, index: int) -> int:
        raise RuntimeError(f"there is no {index}")


def recorded() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> None:
        raise RuntimeError("the data is gone")

    main()


def sharing() -> None:
    """Pass a tensor to a process through shared memory, as torch does it."""
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    tensor = torch.zeros(3).share_memory_()
    process = context.Process(target=fill, args=(tensor,))
    process.start()
    process.join()
    print(process.exitcode, tensor.tolist(), tensor.is_shared())


def fill(tensor: torch.Tensor) -> None:
    tensor += 1


def pause() -> None:
    Path(sys.argv[2]).touch()
    while True:
        signal.pause()


if __name__ == "__main__":
    name, _, first = sys.argv[1].partition(":")
    if first:
        importlib.import_module(first)
    case: Callable[[], None] = globals()[name]
    case()
