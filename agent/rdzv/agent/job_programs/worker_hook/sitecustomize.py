"""Runs inside a worker. Shows the agent its collectives, and any exception that ends the script.

Python finds this file through PYTHONPATH as it starts. It undoes the changes that made it so, and
then imports the site's own `sitecustomize`.

An uncaught exception, or the text of `sys.exit("text")`, is written to the worker's error file, as
torch's `@record` does, unless the file exists.

Once the script has imported torch.distributed, `init_process_group` first starts torch's
`_WorkerServer` on a Unix socket next to the worker's progress file, where only the job's account
may enter. It responds from threads that do not need the interpreter lock. A script that ends
because of a collective's error leaves its record there. Errors in this file do not affect it.

It imports only modules that every interpreter has loaded at startup. It avoids pathlib, which would
delay every worker's start. It supports Python 3.9 and later.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from typing import Any

NAME = "collectives"
"""The prefix of the files' names: `NAME.PID.RANDOM` is a socket, `NAME.PID.why` is a text file,
`NAME.PID.last` is the record of a process that ended because of a collective's error,
`NAME.PID.groups` has the RANKs of its process groups, and `NAME.PID.exits` shows that the script is
over.
"""
MODULE = "torch.distributed.distributed_c10d"
MAX_ERROR_CHARS = 500
HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
"""The handler names under which different versions of torch's server provide the record."""
OLDER = "its torch gives no record of collectives (2.13 does; an older one may not)"
GLOO = r"\[(enforce fail at )?[^\]\s]*\bgloo/[^\]\s]*:\d+\] "
"""Matches the source location with which gloo begins the text of its errors; torch raises them as
plain `RuntimeError`.
"""
NO_COLLECTIVES = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier")
"""Functions of torch.distributed that its record does not contain."""
MAX_CHAIN = 8
MAX_MEMBERS = 4_096
MAX_GROUPS_BYTES = 1 << 18
QUIET = 2
"""The log level at which torch writes nothing but errors."""

_served_by = {"pid": 0}
"""The pid of the process that has tried to start a server; a fork may start its own."""
_recorded_by = {"pid": 0}
"""The pid of the process whose server is running and whose torch has a record."""


def _undo(hook: str) -> None:
    path = os.environ.pop("RDZV_PYTHONPATH", None)
    if path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = path
    sys.path[:] = [entry for entry in sys.path if entry != hook]
    sys.path_importer_cache.pop(hook, None)


class _Finder:
    """Wraps `init_process_group` after its module has run, which the other finders find."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                _wrap_after(spec.loader)
                return spec
        return None


def _wrap_after(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        try:
            del loader.exec_module
        finally:
            execute(module)
        _wrap(module)

    try:
        loader.exec_module = exec_module
    except AttributeError:
        _write_reason("torch.distributed is imported by a loader of its own")


def _wrap(module: Any) -> None:
    init = getattr(module, "init_process_group", None)
    if init is None:
        return
    import functools

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        _serve()
        return init(*args, **kwargs)

    module.init_process_group = init_process_group
    for name in ("_new_group_with_tag", "split_group"):
        if hasattr(module, name):
            setattr(module, name, _showing_members(getattr(module, name), module))


def _showing_members(make: Any, module: Any) -> Any:
    """Wrap a function that makes process groups: torch's record does not say who is in them."""
    import functools

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        try:
            _show_members(module, group)
        except Exception as error:
            _write_reason(f"{type(error).__name__}: {error}")
        return group

    return make_group


def _show_members(module: Any, group: Any) -> None:
    """Write a group's name and RANKs on a line; a later line replaces an earlier one."""
    name = module._world.pg_names.get(group)
    ranks = module._world.pg_group_ranks.get(group, ())
    if name is None or not 0 < len(ranks) <= MAX_MEMBERS or _recorded_by["pid"] != os.getpid():
        return
    line = f"{name} {','.join(map(str, ranks))}\n"
    with open(os.path.join(_folder(), f"{NAME}.{os.getpid()}.groups"), "a") as file:
        if file.tell() + len(line) <= MAX_GROUPS_BYTES:
            file.write(line)


def _serve() -> None:
    if _served_by["pid"] == os.getpid():
        return
    _served_by["pid"] = os.getpid()
    try:
        _start()
    except Exception as error:
        _write_reason(f"{type(error).__name__}: {error}")


def _start() -> None:
    folder = _folder()
    if not folder:
        return
    try:
        from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
            _get_handler_names,
            _WorkerServer,
        )
    except ImportError:
        # Torch 2.4 has a server but no record. A process asked for it while exiting may crash.
        _write_reason(OLDER)
        return
    if not {*HANDLERS} & {*_get_handler_names()}:
        _write_reason(OLDER)
        return
    import signal

    level = _log_level()
    before = level.value
    # The server's path goes through /proc, because a socket's path has 107 bytes at most.
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    # Its threads inherit this mask, so the script's signals go to the script's threads.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        level.value = max(before, QUIET)
        name = f"{NAME}.{os.getpid()}.{os.urandom(4).hex()}"
        server = _WorkerServer(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)
        level.value = before
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _never_end(server)
    _recorded_by["pid"] = os.getpid()
    # Torch has registered functions of its own, which run after this one.
    _watch_end()
    # The script may have since replaced the hook.
    _watch_exceptions()


def _watch_exceptions() -> None:
    """Record any exception that ends the script before the script ends."""
    import errno

    before = sys.excepthook
    if getattr(before, "leaves", None) is _leave_exception:
        return

    def excepthook(kind: Any, error: Any, traceback: Any) -> None:
        try:
            try:
                _leave_exception(kind, error, traceback)
            except OSError as failure:
                if failure.errno != errno.EMFILE:
                    raise
                # The script has all that it may open, but will read no more.
                os.close(0)
                _leave_exception(kind, error, traceback)
        except Exception as failure:
            _write_reason(f"{type(failure).__name__}: {failure}")
        before(kind, error, traceback)

    excepthook.leaves = _leave_exception  # type: ignore[attr-defined]
    sys.excepthook = excepthook


def _watch_end() -> None:
    """Show when the script is over, because the process may take long to end after that."""
    import atexit

    atexit.register(_show_end)


def _show_end() -> None:
    folder = _folder()
    # Children that the script has forked are in the session of the worker.
    if folder and os.getsid(0) == os.getpid():
        try:
            with open(os.path.join(folder, f"{NAME}.{os.getpid()}.exits"), "w"):
                return
        except OSError:
            return


def _watch_exit() -> None:
    """Write the error file if the script ends with `sys.exit("text")`.

    No hook of Python's is called for it: the interpreter writes the text and a newline to stderr
    when no frame of Python is left. Nothing else of the main thread's is written there so.
    """
    import _thread

    main, stderr, texts = _thread.get_ident(), sys.stderr, []
    if stderr is None:
        return
    write = stderr.write

    def watched(text: Any) -> Any:
        if sys._getframe().f_back is None and _thread.get_ident() == main:
            texts.append(text)
            if texts[1:] == ["\n"]:
                try:
                    _write_error_file(texts[0], "")
                except Exception as failure:
                    _write_reason(f"{type(failure).__name__}: {failure}")
        return write(text)

    stderr.write = watched  # type: ignore[method-assign]


def _leave_exception(kind: Any, error: Any, traceback: Any) -> None:
    """Write the error file and, if a collective has failed, the record."""
    if not issubclass(kind, Exception):
        return
    from traceback import format_exception

    stack = "".join(format_exception(kind, error, traceback))
    _write_error_file(f"{kind.__name__}: {_text_of(error)}", stack)
    if _recorded_by["pid"] == os.getpid():
        _leave_record_of(error)


def _leave_record_of(error: Any) -> None:
    """Leave the record if this exception, or one that led to it, was raised by a collective."""
    for _ in range(MAX_CHAIN):
        if error is None:
            return
        by_gloo = _is_of_gloo(error)
        if by_gloo or _is_of_backend(error):
            functions = _functions(error.__traceback__)
            if "_new_process_group_helper" not in functions:
                _leave_record(_text_of(error), failed=by_gloo and _in_collective(functions))
            return
        follows = error.__cause__
        error = follows or (None if error.__suppress_context__ else error.__context__)


def _is_of_gloo(error: Any) -> bool:
    import re

    return type(error) is RuntimeError and re.match(GLOO, _text_of(error)) is not None


def _is_of_backend(error: Any) -> bool:
    torch = sys.modules.get("torch.distributed")
    return isinstance(error, getattr(torch, "DistBackendError", ()))


def _functions(traceback: Any) -> dict[str, bool]:
    """Return the functions of a traceback, innermost last, and whether each belongs to torch."""
    import torch

    folder = os.path.dirname(torch.__file__) + os.sep
    functions: dict[str, bool] = {}
    while traceback is not None:
        code = traceback.tb_frame.f_code
        functions.pop(code.co_name, None)
        functions[code.co_name] = code.co_filename.startswith(folder)
        traceback = traceback.tb_next
    return functions


def _in_collective(functions: dict[str, bool]) -> bool:
    """Outside of one, it may be from `Work.wait`, whose operation may not be recorded."""
    name = next(reversed(functions), "")
    return functions.get(name, False) and name not in NO_COLLECTIVES


def _text_of(error: Any) -> str:
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _write_error_file(text: str, stack: str) -> None:
    """Write what torch's `@record` would write, unless the file already exists."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import json
    import time

    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    message = {"message": text, "extraInfo": extra}
    try:
        with open(path, "x") as file:
            json.dump({"message": message}, file)
    except FileExistsError:
        pass


def _leave_record(error: str, *, failed: bool) -> None:
    """`failed`: the latest collective has. Torch may record that as its end."""
    import json
    import time

    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    path = os.path.join(_folder(), f"{NAME}.{os.getpid()}.last")
    head = {"error": error[:MAX_ERROR_CHARS], "failed": failed, "at_ns": time.time_ns()}
    # A reader sees either all of it or nothing.
    with open(path + ".new", "wb") as file:
        file.write(json.dumps(head).encode() + b"\n")
        file.write(_dump_fr_trace_json())
    os.rename(path + ".new", path)


def _log_level() -> ctypes.c_int:
    import ctypes

    import torch

    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    try:
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except ValueError:
        return ctypes.c_int.in_dll(library, "_ZN3c1022FLAGS_caffe2_log_levelE")


def _never_end(server: Any) -> None:
    """Keep the server from being destroyed, which would wait for threads that a fork lacks."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))


def _folder() -> str:
    return os.path.dirname(os.environ.get("RDZV_PROGRESS_FILE", ""))


def _write_reason(why: str) -> None:
    """Write why there is no record. If that fails, the agent will find neither."""
    try:
        path = os.path.join(_folder(), f"{NAME}.{os.getpid()}.why")
        with open(path, "w") as file:
            file.write(why)
    except OSError:
        pass


_undo(os.path.dirname(os.path.abspath(__file__)))
_watch_exceptions()
_watch_exit()
_watch_end()
if MODULE in sys.modules:
    _wrap(sys.modules[MODULE])
else:
    sys.meta_path.insert(0, _Finder)
del sys.modules["sitecustomize"]
# If the site has none of its own, this raises ImportError as if this file did not exist.
__import__("sitecustomize")
