"""Found by each Python that a test starts: it makes torch cheaper for most of them.

Nothing that torch creates during its import is garbage; without this, the collector searches all of
it repeatedly, and twice more when the process ends. There are hundreds of such imports.

A third of the import goes into operators on tensors that have a shape and no values, and into
kernels in Triton, which need a GPU. These are put off until something is imported that needs them.

If RDZV_TEST_NO_COMPILER names a file, that is run first: it takes the compiler from torch.

A store host loads torch only for a client, and most of hundreds of rounds have none: their workers
do not import torch. With RDZV_TEST_PROMPT_STORES, it loads torch at once, as it does for users.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

PUT_OFF = ("torch._meta_registrations", "torch._native")
NEEDS_THEM = (
    "torch._decomp",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
)


class _Torch:
    """Finds torch like the other finders, and exempts what it creates from the collector."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        if first := os.environ.get("RDZV_TEST_NO_COMPILER"):
            import runpy

            runpy.run_path(first)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        if (spec := next(filter(None, found), None)) and spec.loader:
            run = spec.loader.exec_module

            def run_uncollected(module: Any) -> None:
                collects = gc.isenabled()
                gc.disable()
                try:
                    run(module)
                finally:
                    if collects:
                        gc.freeze()
                        gc.enable()
                # Generators need this of all that was put off.
                core = getattr(module, "_C", None)  # A test's stand-in for torch has none.
                if set_metaclass := getattr(core, "_set_generator_metaclass", None):
                    from torch._opaque_base import OpaqueBaseMeta

                    set_metaclass(OpaqueBaseMeta)

            spec.loader.exec_module = run_uncollected
            _put_off()
        return spec


def _put_off() -> None:
    """Leave some modules empty until one of those that need them is looked for."""
    from importlib.machinery import PathFinder

    find = PathFinder.find_spec
    left: list[Callable[[], None]] = []

    def find_later(name: str, path: Any = None, target: Any = None) -> Any:
        spec = find(name, path, target)
        if name in PUT_OFF and spec and spec.loader:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: left.append(lambda: run(module))
        elif name in NEEDS_THEM:
            PathFinder.find_spec = find
            for load in left:
                load()
        return spec

    PathFinder.find_spec = find_later  # type: ignore[method-assign]


def _wait_for_a_client(listen_fd: int, ready_fd: int) -> None:
    """Have a store host say that it is ready, and look for torch once a client has connected."""
    import select
    from importlib.machinery import PathFinder

    find = PathFinder.find_spec

    def find_for_a_client(name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torch":
            PathFinder.find_spec = find
            os.write(ready_fd, b"ready\n")
            # It says so once more, and nobody reads that.
            os.dup2(os.open(os.devnull, os.O_WRONLY), ready_fd)
            select.select([listen_fd], [], [])
        return find(name, path, target)

    PathFinder.find_spec = find_for_a_client  # type: ignore[method-assign]


sys.meta_path.insert(0, _Torch)
_words = getattr(sys, "orig_argv", [])
if "RDZV_TEST_PROMPT_STORES" not in os.environ and any(
    word.endswith("job_programs/store_host.py") for word in _words[1:2]
):
    _wait_for_a_client(*(int(_words[_words.index(name) + 1]) for name in ("--fd", "--ready-fd")))
