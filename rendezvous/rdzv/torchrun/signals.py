"""Immediately detects the signals that end torchrun.

torch's signal handler only raises an exception in the main thread, and the rendezvous handler is
not called until the workers have been stopped (`torch/distributed/launcher/api.py`, `launch_agent`;
`torch/distributed/elastic/agent/server/api.py`, `run`). But Python writes the number of every
signal that has a handler to its wakeup descriptor, which a thread can read.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_END = 0
"""The value that ends a watch; no signal has this number."""

LEFT_WITHIN_S = 1.0
"""How long to wait for the thread of a watch that has ended."""

_left: dict[int, tuple[int, threading.Thread]] = {}
"""Pipes to which Python still writes signals although their watch has ended, as a map from the
write end to the read end and its thread. A watch that ends outside the main thread leaves its pipe
open, because only the main thread can change the wakeup descriptor, and without an open read end
Python would print warnings.
"""

_watched: set[int] = set()
"""The write ends of all pipes to which Python may write signals."""


def _in_a_fork() -> None:
    """Keep a fork from writing its signals to its parent's pipe."""
    present = signal.set_wakeup_fd(-1)
    if present not in _watched:
        signal.set_wakeup_fd(present)


os.register_at_fork(after_in_child=_in_a_fork)


def watch_signals(on_signal: Callable[[signal.Signals], None]) -> Callable[[], None]:
    """Call `on_signal`, in a separate thread, for each signal that ends torchrun.

    Returns the function that ends the watch. Outside the main thread, or if the wakeup descriptor
    is already in use, nothing is watched.
    """
    if not _in_main_thread():
        return lambda: None
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    former = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    if former in _left:
        _close_left(former)
    elif former != -1:
        signal.set_wakeup_fd(former)
        os.close(read_end)
        os.close(write_end)
        return lambda: None
    _watched.add(write_end)
    awaited = _awaited()
    leaves_pipe = threading.Event()

    def watch() -> None:
        while (received := os.read(read_end, 1)[0]) != _END:
            if received in awaited:
                on_signal(signal.Signals(received))
        if not leaves_pipe.is_set():
            os.close(read_end)

    thread = threading.Thread(target=watch, name="rdzv-signals", daemon=True)

    def stop() -> None:
        if not _in_main_thread():
            _left[write_end] = read_end, thread
            leaves_pipe.set()
            os.write(write_end, bytes([_END]))
            return
        present = signal.set_wakeup_fd(-1)
        if present != write_end:
            # Other code has replaced the descriptor.
            signal.set_wakeup_fd(present)
        _watched.remove(write_end)
        os.write(write_end, bytes([_END]))
        os.close(write_end)

    try:
        thread.start()
    except BaseException:
        # Ctrl-C may have interrupted the start; the thread may be running, and must be ended here.
        stop()
        raise
    return stop


def _close_left(write_end: int) -> None:
    """Close a pipe that an ended watch has left open, once its thread no longer reads from it.

    It is not closed earlier, because the thread that ends the watch may still write to it.
    """
    read_end, thread = _left.pop(write_end)
    _watched.remove(write_end)
    thread.join(LEFT_WITHIN_S)
    if not thread.is_alive():
        os.close(write_end)
        os.close(read_end)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _awaited() -> set[int]:
    """Return the signals in --signals-to-handle, which `launch_agent` leaves in the environment."""
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    known = signal.Signals.__members__
    return {known[name.strip()] for name in names.split(",") if name.strip() in known}
