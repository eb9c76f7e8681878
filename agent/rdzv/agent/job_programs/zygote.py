"""The zygote, an interpreter that has imported torch and forks workers and store hosts.

The zygote is started with a worker's command line (`python -u train.py ...`, or -m, or -c), and
with a folder on PYTHONPATH whose `sitecustomize` calls `main` below while the interpreter is
starting, just before it would run the script. `main` preloads the modules named in its order and
waits for requests. In a forked worker it returns, and the interpreter continues with the script as
usual. This means that `__main__`, `sys.argv`, -m and -c, tracebacks, exit codes and exit handlers
are the interpreter's own rather than imitations, and no frame of this file is below the script's.

Until it preloads modules, it imports only the standard library. It supports older Python versions
than rdzv itself.

RDZV_ZYGOTE in its environment is its order, a JSON object:

    {path, script, check}       print in JSON which of the modules in `check` are missing, or why
                                workers cannot be forked here at all (`refused`), and exit
    {path, argv, fd, modules, for_restarts}
                                preload, then serve; fd is a Unix seqpacket socket to the runner

`path` is the PYTHONPATH that a worker would have, or null for none; `argv` is the zygote's own
command line; `script` is the worker's script, -m or -c. Messages on the socket:

    {ready: {modules, threads, memory_kb, seconds}}   it accepts fork requests
    {refused: reason}                    workers cannot be forked from this; it exits
    {fork: batch, forks: n}              from the runner, with a stream socket for each: its link
    {forked: batch, pids, reason}        `reason` if there are fewer pids than requested

Each process is forked twice, so that the runner, which is a subreaper, becomes its parent. A fork
does nothing until it has read its order from its link, in a frame (4 bytes of length, big endian,
then JSON). If the link is closed before that, the fork is not needed and exits.

* A worker: {argv, env, given, cwd, cpus, parent, stdout, stderr}, with three standard streams.
  `given` is the environment that the zygote was given; `stdout` and `stderr` are files to append to
  in place of the streams, null for none. The worker opens them, not the runner, which would hang if
  their file system does. With `link_variable`, a socket to the runner comes, too, and the worker
  finds its descriptor in that variable. The worker answers {ready: true} and closes the link; or
  {failed: reason}, if no worker could be started like this; or {refused: reason}, if a cold one
  could. `watch` is the address to which torch_watch.py reports, null for none.
* A store host: {store_host: {argv, env, cpus, parent}}, with the same streams and the listening
  socket. It serves as store_host.py does, with the command line `argv`. It answers {ready: true}
  once it serves, or {refused: reason}.
"""

from __future__ import annotations

import array
import ctypes
import errno
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import mmap
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, NoReturn

BARE = ("torch", "numpy")
"""Modules to import first. The threads that they start on import are harmless in a fork."""

BESIDE_TORCH = "rdzv.worker.session"
"""A module imported along with torch, if installed: it takes 20 ms, and kept workers need it."""

MAX_FDS = 253
"""The maximum number of descriptors that the kernel accepts with one message."""

_PR_SET_PDEATHSIG = 1
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14

CANARY_TIMEOUT_S = 10.0
"""How long the first fork may take to prove that forks of this process work."""

_THREADS_END_WITHIN_S = 1.0

_DEVICES = (
    *("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/xpu", "/dev/davinci", "/dev/neuron"),
    *("/dev/accel", "/dev/habanalabs", "/dev/hl", "/dev/vfio/", "/dev/infiniband/"),
)
"""Accelerators and RDMA adapters, whose drivers tie memory and queues to a single process."""

_UNSHARABLE = ("socket:", "pipe:", "anon_inode:", *_DEVICES)
"""Descriptors that processes cannot share as if each had opened its own."""

_torch_seed: dict[str, int] = {}
"""torch's seed after its import, as `fresh`. A module that seeds torch would seed all workers."""

_OOM_SCORE = "/proc/self/oom_score_adj"
_oom_score: dict[str, str] = {}
"""The score, as `before`, from before this process changed it; empty if it did not."""

_LOW_PRIORITY = 5

_libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """Raised if workers cannot be forked from this process; the message gives the reason."""


class StartError(Exception):
    """Raised if a worker cannot be started as requested, whether or not it is forked."""


def main(hook: str) -> bool:
    """Carry out the order in RDZV_ZYGOTE. Returns, only in workers, whether the site customizes.

    `hook` is the folder whose `sitecustomize` calls this function.
    """
    order = json.loads(os.environ.pop("RDZV_ZYGOTE"))
    _forget(hook, order["path"])
    if "check" in order:
        _answer_check(order["check"], order["script"])
    control = socket.socket(fileno=order["fd"])
    control.setblocking(True)
    os.set_inheritable(control.fileno(), False)
    _show_title(f"rdzv zygote: {', '.join(order['modules'])}")
    _be_expendable()
    if order.get("for_restarts"):
        _leave_cpus_to_others(_LOW_PRIORITY)
    try:
        has_own_customize = _customize()
        ready = _preload(order["modules"])
    except RefusedError as error:
        _write_frame(control, {"refused": str(error)})
        os._exit(1)
    if order.get("for_restarts"):
        _leave_cpus_to_others(0)
    _write_frame(control, {"ready": ready})
    _serve(control, [_bytes(word) for word in order["argv"]])
    return has_own_customize


def _be_expendable() -> None:
    try:
        _oom_score["before"] = Path(_OOM_SCORE).read_text()
        Path(_OOM_SCORE).write_text("1000")
    except OSError:
        _oom_score.clear()


def _leave_cpus_to_others(nice: int) -> None:
    """Set this session's autogroup: forks inherit a nice value, and could not raise it again."""
    for _ in range(5):
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
            return
        except BlockingIOError:
            time.sleep(0.1)  # The kernel allows ten changes per second on the whole machine.
        except OSError:
            return


def _forget(hook: str, path: str | None) -> None:
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = _text(_bytes(path))
    sys.path[:] = [entry for entry in sys.path if entry != hook]
    sys.path_importer_cache.pop(hook, None)


def _customize() -> bool:
    """Import the site's own `sitecustomize`. Returns whether there is one."""
    del sys.modules["sitecustomize"]
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise RefusedError(f"its sitecustomize: {_words(error)}") from error
        return False
    except Exception as error:
        raise RefusedError(f"its sitecustomize: {_words(error)}") from error
    return True


def _answer_check(names: Iterable[str], script: str) -> None:
    answer: dict[str, object] = {}
    try:
        _customize()
        answer["missing"] = _missing(names, script)
    except RefusedError as error:
        answer["refused"] = str(error)
    os.write(1, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _missing(names: Iterable[str], script: str) -> dict[str, str]:
    missing = {}
    with _ScriptFolder(script):
        for name in names:
            try:
                if importlib.util.find_spec(name.partition(".")[0]) is None:
                    missing[name] = f"No module named {name.partition('.')[0]!r}"
            except Exception as error:
                missing[name] = _words(error)
    return missing


# ---------------------------------------------------------------------- preloading


class _ScriptFolder:
    """A context in which imports find the same modules as in the script."""

    def __init__(self, script: str) -> None:
        self._script = script
        self._entry = _first_of_path(script)

    def __enter__(self) -> None:
        if self._entry is not None:
            sys.path.insert(0, self._entry)
        if self._script not in ("-m", "-c"):
            # Without this, libraries may mistake this process for an interactive session.
            sys.modules["__main__"].__file__ = str(Path(self._script).absolute())

    def __exit__(self, *_: object) -> None:
        if self._entry in sys.path:
            sys.path.remove(self._entry)  # The interpreter will add it again itself.
        vars(sys.modules["__main__"]).pop("__file__", None)


def _first_of_path(script: str) -> str | None:
    """Return the entry that an interpreter prepends to `sys.path` when it runs the script."""
    if getattr(sys.flags, "safe_path", False):
        return None
    if script == "-c":
        return ""
    if script == "-m":
        return str(Path.cwd())
    path = Path(script).resolve()
    return str(path if path.is_dir() or path.suffix in (".zip", ".pyz") else path.parent)


def _preload(modules: Sequence[str]) -> dict[str, Any]:
    """Import modules, starting with those in `BARE`. Returns a description of this process."""
    since = time.monotonic()
    fds = set(open_fds())
    threads = 1
    with _ScriptFolder(sys.argv[0]):
        for name in sorted(modules, key=lambda name: name not in BARE):
            try:
                importlib.import_module(name)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise RefusedError(f"import {name}: {_words(error)}") from error
            if name == "torch":
                _torch_seed["fresh"] = sys.modules["torch"].initial_seed()
            if name in BARE:
                threads = max(threads, len(thread_names()))
            check_forkable(name, threads, fds)
        if "torch" in modules:
            with suppress(ImportError):
                importlib.import_module(BESIDE_TORCH)
    importlib.invalidate_caches()  # Workers need not import what this imports.
    try_fork()
    gc.collect()
    # Otherwise each worker's collector would write to every shared page, and thereby copy it.
    gc.freeze()
    return {
        "modules": list(modules),
        "threads": threads,
        "memory_kb": _memory_kb(),
        "seconds": time.monotonic() - since,
    }


def check_forkable(name: str, threads: int, fds: set[int]) -> None:
    if "threading" in sys.modules and len(sys._current_frames()) > 1:
        found = [thread.name for thread in sys.modules["threading"].enumerate()[1:]]
        raise RefusedError(f"import {name} starts Python threads ({', '.join(found)})")
    found = thread_names()
    if len(found) > threads:
        raise RefusedError(
            f"import {name} leaves {len(found)} threads ({', '.join(found)}), where the "
            f"bare import leaves {threads}; a fork has only the first"
        )
    children = child_pids()
    if children:
        raise RefusedError(f"import {name} starts processes (pid {', '.join(children)})")
    for fd, target in open_fds().items():
        if fd not in fds and target.startswith(_UNSHARABLE):
            why = "a device, which no fork can use" if target.startswith(_DEVICES) else target
            raise RefusedError(f"import {name} opens {why} ({target}, fd {fd})")
    for path in mapped_files():
        if path.startswith(_DEVICES):
            raise RefusedError(f"import {name} maps a device, which no fork can use ({path})")
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise RefusedError(f"import {name} initialises CUDA, which no fork can use")


def try_fork() -> None:
    """Fork once; refuse if the fork cannot compute or start a thread, hangs, or has a thread left.

    The threads of OpenBLAS, which numpy and torch start on import, end at every fork.
    """
    read_end, write_end = os.pipe()
    zygote = os.getpid()
    pid = _fork()
    if pid == 0:
        os.close(read_end)
        _be_canary(zygote, write_end)
    os.close(write_end)
    in_time = select.select([read_end], [], [], CANARY_TIMEOUT_S)[0]
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    complaint = os.read(read_end, 1 << 12).decode(errors="replace") if in_time else ""
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    if not in_time:
        raise RefusedError(f"a fork of it hangs: it has not computed within {CANARY_TIMEOUT_S:g} s")
    if os.WIFSIGNALED(status):
        raise RefusedError(f"a fork of it is killed by signal {os.WTERMSIG(status)}")
    if complaint or status:
        raise RefusedError(f"a fork of it does not work: {complaint or 'it exits'}")
    until = time.monotonic() + _THREADS_END_WITHIN_S
    while len(found := thread_names()) > 1:
        if time.monotonic() > until:
            raise RefusedError(
                f"the imports leave {len(found)} threads ({', '.join(found)}) that "
                "survive forks; a fork has only the first"
            )
        time.sleep(0.001)  # A thread that has ended may still be listed for a moment.


def _be_canary(zygote: int, write_end: int) -> NoReturn:
    try:
        _die_with_parent(zygote)
        complaint = compute()
    except BaseException as error:
        complaint = _words(error)
    os.write(write_end, complaint.encode(errors="replace")[: 1 << 12])
    os._exit(0)


def compute() -> str:
    """Try to start a thread and, with torch, to compute on several. Returns any failure."""
    import threading

    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    torch: Any = sys.modules.get("torch")
    for name in ("cuda", "xpu", "mtia"):
        is_bad = getattr(getattr(torch, name, None), "_is_in_bad_fork", bool)
        if is_bad():
            return f"torch.{name} was initialised before"
    if hasattr(torch, "set_num_threads"):
        torch.set_num_threads(max(2, torch.get_num_threads()))
        # More elements than OpenMP assigns to one thread.
        ones = torch.ones(1024, 256)
        if (ones @ ones.T).sum().item() != 1024 * 1024 * 256:
            return "torch computes a wrong sum"
    return ""


def thread_names() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return names


def mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_bytes().splitlines()
    return {os.fsdecode(line.split(maxsplit=5)[5]) for line in lines if b"/" in line}


def child_pids() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def open_fds() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found[int(entry.name)] = os.readlink(entry)  # noqa: PTH115  # Before Python 3.9.
    return found


def _memory_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


# ---------------------------------------------------------------------- serving


def _serve(control: socket.socket, argv: Sequence[bytes]) -> None:
    """Fork on request until the runner is gone. Returns only in workers."""
    while True:
        request, links, lost = _read_frame(control)
        if request is None:
            os._exit(0)
        if not lost and len(links) != request.get("forks"):
            # The runner is older than this file, which was replaced while the runner was running.
            _write_frame(control, {"refused": "its runner is of another version"})
            os._exit(1)
        answer, mine = _fork_all(control, links, lost=lost)
        if answer is None:
            _carry_out_order(links, mine, argv)
            return
        for fd in links:
            os.close(fd)
        _write_frame(control, {"forked": request["fork"], **answer})


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for _, _, part in ancillary:
        fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return fds.tolist()


def _fork_all(
    control: socket.socket, links: Sequence[int], *, lost: bool
) -> tuple[dict[str, object] | None, int]:
    """Fork once for each link. In a fork, return None and the fork's index.

    Makes no forks if some links were `lost` for lack of descriptors.
    """
    if lost:
        return {"pids": [], "reason": f"fork: {os.strerror(errno.EMFILE)}"}, -1
    try:
        read_end, write_end = os.pipe()
    except OSError as error:
        return {"pids": [], "reason": f"fork: {error.strerror}"}, -1
    try:
        middle = _fork()
    except OSError as error:
        os.close(read_end)
        os.close(write_end)
        return {"pids": [], "reason": f"fork: {error.strerror}"}, -1
    if middle == 0:
        mine = _fork_each(len(links), write_end)
        control.close()
        os.close(read_end)
        os.close(write_end)
        return None, mine
    os.close(write_end)
    _, status = os.waitpid(middle, 0)
    # Everything it wrote fits into the pipe and is there, so this does not wait for the forks.
    packed = os.read(read_end, 4 * len(links)) if os.WIFEXITED(status) else b""
    os.close(read_end)
    pids = list(struct.unpack(f"{len(packed) // 4}i", packed))
    if len(pids) == len(links):
        return {"pids": pids, "reason": ""}, -1
    return {"pids": pids, "reason": f"fork: {_describe(status)}"}, -1


def _describe(status: int) -> str:
    if os.WIFEXITED(status):
        return os.strerror(os.WEXITSTATUS(status))
    return f"the intermediate process was killed by signal {os.WTERMSIG(status)}"


def _fork_each(count: int, write_end: int) -> int:
    code = 1
    try:
        for place in range(count):
            pid = _fork()
            if pid == 0:
                return place
            os.write(write_end, struct.pack("i", pid))
        code = 0
    except OSError as error:
        code = error.errno or 1
    os._exit(code)


def _fork() -> int:
    with warnings.catch_warnings():
        # These threads are known to be harmless.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


# ---------------------------------------------------------------------- a fork


def _carry_out_order(links: Sequence[int], mine: int, zygote_argv: Sequence[bytes]) -> None:
    os.setsid()
    if _oom_score:
        with suppress(OSError):
            Path(_OOM_SCORE).write_text(_oom_score["before"])
    for fd in {*links} - {links[mine]}:
        os.close(fd)
    with socket.socket(fileno=links[mine]) as link:
        link.setblocking(True)
        try:
            # This is done first, while nothing is waiting for this fork.
            _renew_randomness()
            spec, fds, _ = _read_frame(link)
            if spec is None:
                os._exit(0)
            _take_streams(fds)
            if "store_host" in spec:
                _be_store_host(spec["store_host"], fds[3], link)
            if "snapshot_writer" in spec:
                _be_snapshot_writer(spec["snapshot_writer"], fds[3:], link)
            if "link_variable" in spec:
                spec["env"][spec["link_variable"]] = str(fds[3])
            _apply(spec, zygote_argv)
            if spec.get("watch"):
                _watch_torch(spec["watch"], spec["env"])
        except StartError as error:
            _give_up(link, {"failed": str(error)})
        except RefusedError as error:
            _give_up(link, {"refused": str(error)})
        except BaseException as error:
            _give_up(link, {"refused": _words(error)})
        _write_frame(link, {"ready": True})


def _give_up(link: socket.socket, why: Mapping[str, object]) -> None:
    _write_frame(link, why)
    os._exit(1)


def _take_streams(fds: Sequence[int]) -> None:
    for fd, stream in enumerate(fds[:3]):
        os.dup2(stream, fd)
        os.close(stream)


def _become(spec: Mapping[str, Any], arguments: Sequence[str]) -> list[bytes]:
    _die_with_parent(spec["parent"])
    os.sched_setaffinity(0, spec["cpus"])
    argv, env = [_bytes(word) for word in (*spec["argv"], *arguments)], _environment(spec["env"])
    os.environb.clear()
    os.environb.update(env)
    _show_as(argv, env)
    return argv


def _be_store_host(spec: Mapping[str, Any], listen_fd: int, link: socket.socket) -> None:
    """Errors are raised only before the first client is served. Never returns."""
    argv = _become(spec, ["--fd", str(listen_fd), "--ready-fd", str(link.fileno())])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    path = _text(argv[1])
    names: dict[str, Any] = {"__name__": "rdzv store host", "__file__": path}
    exec(compile(Path(path).read_bytes(), path, "exec"), names)
    store = names["serve"](listen_fd, whole_torch=True)
    try:
        _write_frame(link, {"ready": True})
        link.close()
        names["keep_serving"](store)
    finally:
        os._exit(1)


def _be_snapshot_writer(spec: Mapping[str, Any], fds: list[int], link: socket.socket) -> None:
    """Errors are raised only before the writer has begun. Never returns."""
    if spec["cwd"] is not None:
        _change_folder(_text(_bytes(spec["cwd"])))
    if spec["copied"]:
        spec["env"][spec["copied"]] = str(fds.pop())
    argv = _become(spec, [str(fd) for fd in fds])
    _renew_streams()
    sys.argv = [_text(word) for word in argv[2:]]
    writer = importlib.import_module(sys.argv[0])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    code = 1
    try:
        _write_frame(link, {"ready": True})
        link.close()
        writer.main()
        code = 0
    except SystemExit as end:
        sys.stderr.write(f"{end}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# ---------------------------------------------------------------------- a worker


def _apply(spec: Mapping[str, Any], zygote_argv: Sequence[bytes]) -> None:
    _die_with_parent(spec["parent"])
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if spec.get(name) is not None:
            _append_to(name, _text(_bytes(spec[name])), fd)
    argv = [_bytes(word) for word in spec["argv"]]
    env, given = _environment(spec["env"]), _environment(spec["given"])
    _take_arguments(argv, zygote_argv)
    if spec["cwd"] is not None:
        _change_folder(_text(_bytes(spec["cwd"])))
    if spec["cpus"] is not None:
        try:
            os.sched_setaffinity(0, spec["cpus"])
        except OSError as error:
            raise StartError(f"cpus {spec['cpus']!r:.80}: {error.strerror}") from error
    change_environment(env, given)
    _set_mark(env)
    _renew_streams()
    importlib.invalidate_caches()
    _show_as([os.fsencode(word) for word in getattr(sys, "orig_argv", ())] or argv, env)
    # The zygote blocks all signals intended for workers, so none has reached this process.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _set_mark(env: Mapping[bytes, bytes]) -> None:
    """Mark this process and its descendants, as the runner's processes.py does."""
    limits, mark = 10, env.get(b"RDZV_WORKER_MARK", b"")
    if mark.isdigit():
        with suppress(OSError, ValueError):
            resource.setrlimit(limits, (int(mark), resource.getrlimit(limits)[1]))


def _watch_torch(address: str, env: Mapping[str, str]) -> None:
    # The import of torch._dynamo sets it, and so does its compiler; a script may do so in between.
    if "TORCHINDUCTOR_CACHE_DIR" not in env:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    name = "rdzv torch watch"
    path = str(Path(__file__).with_name("torch_watch.py"))
    names: dict[str, Any] = {"__name__": name, "__file__": path}
    loader: Any = importlib.machinery.SourceFileLoader(name, path)
    exec(loader.get_code(name), names)
    names["watch_hidden"](address)


def _append_to(name: str, path: str, fd: int) -> None:
    """As the runner's spawn.py does for cold workers."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK, because opening a FIFO without a reader would block.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK
        log = os.open(path, flags, 0o666)
    except (OSError, ValueError) as error:
        folder = getattr(error, "filename", None)
        where = "" if folder in (None, path) else f": its folder {folder!r}"
        reason = getattr(error, "strerror", None) or error
        raise StartError(f"{name} {path!r}{where}: {reason}") from error
    os.set_blocking(log, True)
    os.dup2(log, fd)
    os.close(log)


def _die_with_parent(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # The runner is already dead.


def _take_arguments(argv: Sequence[bytes], zygote_argv: Sequence[bytes]) -> None:
    """Set the script's arguments. The interpreter already knows the script itself."""
    count = len(sys.argv) - 1
    before = len(zygote_argv) - count
    if argv[:before] != zygote_argv[:before]:
        raise RefusedError(f"the zygote runs {zygote_argv[:before]!r}, not {argv[:before]!r}")
    arguments = [_text(word) for word in argv[before:]]
    sys.argv[1:] = arguments
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[len(sys.orig_argv) - count :] = arguments


def _environment(env: Mapping[str, str]) -> dict[bytes, bytes]:
    return {_bytes(name): _bytes(value) for name, value in env.items()}


def change_environment(env: Mapping[bytes, bytes], given: Mapping[bytes, bytes]) -> None:
    """Set a worker's environment, repeating the changes that were made to the zygote's.

    The interpreter, a wrapper, or a module on import may have set a variable. It would have done so
    in the worker as well, unless the worker is given a different value.
    """
    wanted = dict(env)
    now = dict(os.environb)
    for name in [*given, *now]:
        if now.get(name) != given.get(name) and env.get(name) == given.get(name):
            if name in now:
                wanted[name] = now[name]
            else:
                wanted.pop(name, None)
    os.environb.clear()
    for name, value in wanted.items():
        os.environb[name] = value


def _change_folder(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        raise StartError(f"cwd {cwd!r}: {error.strerror}") from error


def _renew_streams() -> None:
    """Replace the layers below the objects, to which preloaded modules may hold references."""
    streams: Any = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    for fd, stream in enumerate(streams):
        if stream is None:
            continue
        buffer, mode, name = stream.buffer, stream.mode, stream.name
        raw: Any = io.FileIO(fd, getattr(buffer, "raw", buffer).mode, closefd=False)
        raw.name = name
        stream.__init__(
            type(buffer)(raw) if hasattr(buffer, "raw") else raw,
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        stream.mode = mode


def _renew_randomness() -> None:
    """As in a fresh interpreter. GPU generators start from the same number in every process."""
    random.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() == _torch_seed.get("fresh"):
        torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


# ---------------------------------------------------------------------- what `ps` shows


_MAP_FIELDS = (
    *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack"),
    *("arg_start", "arg_end", "env_start", "env_end"),
)


class _MemoryMap(ctypes.Structure):
    """The kernel's `struct prctl_mm_map`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _MAP_FIELDS),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_shown: list[mmap.mmap] = []
"""The memory from which /proc reads the command line and the environment."""


def _show_title(title: str) -> None:
    _show_as([title.encode()], {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()})


def _show_as(argv: Sequence[bytes], env: Mapping[bytes, bytes]) -> None:
    words = b"".join(word + b"\0" for word in argv)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in env.items())
    memory = mmap.mmap(-1, len(words) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # The command is in parentheses and may contain any character.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    stat = [b"", b"", *fields]
    start_code, end_code, start_stack = (int(stat[place - 1]) for place in (26, 27, 28))
    start_data, end_data, start_brk = (int(stat[place - 1]) for place in (45, 46, 47))
    _libc.sbrk.restype = ctypes.c_void_p
    middle, end = start + len(words), start + len(words) + len(variables)
    wanted = _MemoryMap(
        *(start_code, end_code, start_data, end_data, start_brk, _libc.sbrk(0), start_stack),
        *(start, middle, middle, end, None, 0, 0xFFFFFFFF),
    )
    size = ctypes.c_ulong(ctypes.sizeof(wanted))
    _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(wanted), size, 0)
    _shown[:] = [memory]


# ---------------------------------------------------------------------- frames and text


def _read_frame(link: socket.socket) -> tuple[dict[str, Any] | None, list[int], bool]:
    """Also return whether descriptors were lost because this process had too many open."""
    header, fds, lost = _read_exactly(link, 4)
    payload = header and _read_exactly(link, struct.unpack(">I", header)[0])[0]
    return json.loads(payload) if payload else None, fds, lost


def _read_exactly(link: socket.socket, count: int) -> tuple[bytes, list[int], bool]:
    data = b""
    fds: list[int] = []
    lost = False
    while len(data) < count:
        try:
            part, ancillary, flags, _ = link.recvmsg(
                count - len(data), socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return b"", fds, lost
        if not part:
            return b"", fds, lost
        data += part
        fds += _descriptors(ancillary)
        lost |= bool(flags & socket.MSG_CTRUNC)
    return data, fds, lost


def _write_frame(link: socket.socket, message: Mapping[str, object]) -> None:
    payload = json.dumps(message).encode()
    try:
        link.sendall(struct.pack(">I", len(payload)) + payload)
    except OSError:
        os._exit(0)  # The runner is gone, or no longer needs this fork.


def _bytes(text: str) -> bytes:
    """The runner is in UTF-8 mode."""
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return os.fsdecode(data)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
