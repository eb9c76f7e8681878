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


class _Reader:
    """Reads what Python writes into a pipe, in a thread that lasts as long as the process."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self.watches: dict[object, tuple[Callable[[signal.Signals], None], set[int]]] = {}
        """For each watch, what it calls, and for which signals."""
        threading.Thread(target=self._read, name="rdzv-signals", daemon=True).start()

    def _read(self) -> None:
        while True:
            for number in os.read(self._read_end, 64):
                for on_signal, awaited in tuple(self.watches.values()):
                    if number in awaited:
                        on_signal(signal.Signals(number))


_reader: _Reader | None = None
"""This process's reader; there is one from the first watch on."""


def _in_a_fork() -> None:
    """Keep a fork, which has no reader's thread, from writing its signals to its parent's pipe."""
    global _reader  # noqa: PLW0603
    if _reader is not None:
        _leave_descriptor(_reader)
    _reader = None


os.register_at_fork(after_in_child=_in_a_fork)


def _leave_descriptor(reader: _Reader) -> None:
    present = signal.set_wakeup_fd(-1)
    if present != reader.write_end:
        # Other code has replaced the descriptor.
        signal.set_wakeup_fd(present)


def watch_signals(on_signal: Callable[[signal.Signals], None]) -> Callable[[], None]:
    """Call `on_signal`, in a separate thread, for each signal that ends torchrun.

    Returns the function that ends the watch. Outside the main thread, or if the wakeup descriptor
    is already in use, nothing is watched.
    """
    global _reader  # noqa: PLW0603
    if not _in_main_thread():
        return lambda: None
    reader = _reader = _reader or _Reader()
    former = signal.set_wakeup_fd(reader.write_end, warn_on_full_buffer=False)
    if former not in (-1, reader.write_end):
        signal.set_wakeup_fd(former)
        return lambda: None
    watch = object()
    reader.watches[watch] = on_signal, _awaited()

    def stop() -> None:
        reader.watches.pop(watch, None)
        # Only the main thread can change the descriptor; until it does, signals are read in vain.
        if _in_main_thread() and not reader.watches:
            _leave_descriptor(reader)

    return stop


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _awaited() -> set[int]:
    """Return the signals in --signals-to-handle, which `launch_agent` leaves in the environment."""
    names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    known = signal.Signals.__members__
    return {known[name.strip()] for name in names.split(",") if name.strip() in known}
