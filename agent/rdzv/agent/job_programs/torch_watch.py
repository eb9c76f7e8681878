"""Reports to the runner when a worker imports torch, and what its script changed before that.

An import finder is placed before the others, in workers that start cold (by watch_hook/) and in
forks of a zygote, in which torch is hidden until the script imports it.

The report is a JSON datagram to a Unix socket with an abstract address: {changed}, the names of the
variables that torch reads on import and that the script had changed before, which is too late in a
fork. The C library's environment is compared as well.

This module supports older Python versions, and imports next to nothing before torch is imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any

READ_ON_IMPORT = (
    *("TORCH", "PYTORCH_", "CUDA_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("GOTO_NUM_THREADS", "BLIS_", "NUMEXPR_"),
)
"""Prefixes of the variables that torch, numpy and their libraries may read on import."""

READ_LATER = ("CUDA_VISIBLE_DEVICES", "TORCH_NCCL_", "TORCHELASTIC_")
"""Exceptions, which are read only when CUDA or a process group is initialised."""

MAX_NAMES = 8
MAX_NAME_LENGTH = 64

SEND_TIMEOUT_S = 1.0
"""How long to wait for the runner to read earlier reports."""


def watch(address: str) -> None:
    sys.meta_path.insert(0, _Watch(address, {}))


def watch_hidden(address: str) -> None:
    """Like `watch`, but in a process that has already imported torch, as if it had not."""
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if name == "torch" or name.startswith("torch.")
    }
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, _Watch(address, hidden))


class _Watch:
    def __init__(self, address: str, hidden: Mapping[str, ModuleType]) -> None:
        self._address = address
        self._before = dict(os.environb)
        self._hidden = hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find torch through the other finders, and let its loader report the import."""
        if name != "torch":
            return None
        if self._hidden:
            return self._spec_of_hidden()
        found = (
            finder.find_spec(name, path, target)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next(filter(None, found), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._report_when_run(spec.loader)
        return spec

    def _report_when_run(self, loader: Any) -> None:
        own, run = vars(loader).get("exec_module"), loader.exec_module

        def run_and_report(module: ModuleType) -> None:
            changed = self._end()
            if own is None:
                del loader.exec_module
            else:
                loader.exec_module = own
            run(module)
            self._report(changed)

        loader.exec_module = run_and_report

    def _spec_of_hidden(self) -> Any:
        from importlib.machinery import ModuleSpec

        spec: Any = self._hidden["torch"].__spec__
        loader: Any = _Loader(self, spec)
        found = ModuleSpec("torch", loader, origin=spec.origin)
        found.submodule_search_locations = spec.submodule_search_locations
        found.has_location = spec.has_location
        return found

    def show(self, module: ModuleType, spec: Any) -> None:
        """Make the hidden module visible to the script, and report its import."""
        changed = self._end()
        module.__spec__ = spec
        sys.modules.update(self._hidden)
        self._report(changed)

    def _end(self) -> list[str]:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        now, before = _environment_of_c(), self._before
        names = {os.fsdecode(name) for name in {*now, *before} if now.get(name) != before.get(name)}
        return sorted(
            name
            for name in names
            if name.startswith(READ_ON_IMPORT) and not name.startswith(READ_LATER)
        )

    def _report(self, changed: list[str]) -> None:
        import json
        import socket

        message = {"changed": [name[:MAX_NAME_LENGTH] for name in changed[:MAX_NAMES]]}
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_TIMEOUT_S)
                sender.sendto(json.dumps(message).encode(), "\0" + self._address)
        except OSError:
            pass  # The runner no longer listens, or is in another network namespace.


class _Loader:
    def __init__(self, watch: _Watch, spec: Any) -> None:
        self._watch = watch
        self._spec = spec

    def create_module(self, _: object) -> ModuleType:
        return self._watch._hidden["torch"]

    def exec_module(self, module: ModuleType) -> None:
        self._watch.show(module, self._spec)

    def __getattr__(self, name: str) -> object:
        return getattr(self._spec.loader, name)


def _environment_of_c() -> dict[bytes, bytes]:
    """Return the C library's environment, which `os.putenv` also changes."""
    try:
        import ctypes

        entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    except (ImportError, OSError, ValueError):
        return dict(os.environb)
    found: dict[bytes, bytes] = {}
    place = 0
    while entry := entries[place]:
        name, _, value = entry.partition(b"=")
        found.setdefault(name, value)
        place += 1
    return found
