"""Found by each Python that a test starts: it makes torch cheaper for most of them.

Nothing that torch creates during its import is garbage; without this, the collector searches all of
it repeatedly, and twice more when the process ends. There are hundreds of such imports.

Half of the import goes into what few scripts use. The modules of PUT_OFF, operators on tensors that
have a shape and no values, and kernels in Triton, which need a GPU, are run once something is
imported that needs them. Those of ON_USE are run when they are asked for anything.

If RDZV_TEST_NO_COMPILER names a file, that is run first: it takes the compiler from torch.

A store host loads torch only for a client, and most of hundreds of rounds have none: their workers
do not import torch. With RDZV_TEST_PROMPT_STORES, it loads torch at once, as it does for users.
"""

from __future__ import annotations

import gc
import os
import sys
from _thread import RLock
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:  # Else each of the many programs would import more than it needs.
    from collections.abc import Callable
    from typing import Any

PUT_OFF = ("torch._meta_registrations", "torch._native")
ON_USE = (
    *("torch.export", "torch._higher_order_ops", "torch.compiler", "torchgen.model", "pynvml"),
    *("torch.distributions", "torch.masked", "torch.hub", "torch.quantization"),
    *("torch.nn.intrinsic", "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized"),
)
HAS_TAKEN, TAKEN = "torch._higher_order_ops", ("cond", "while_loop")
"""What torch takes from one of them while it is imported."""
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
                    try:
                        from torch._custom_class_base import CustomClassBaseMeta as Meta
                    except ImportError:  # Before torch 2.14.
                        from torch._opaque_base import OpaqueBaseMeta as Meta
                    set_metaclass(Meta)

            spec.loader.exec_module = run_uncollected
            _put_off()
        return spec


_left: dict[str, Callable[[], None]] = {}
"""What was put off, by name."""
_loading = RLock()


def _load(name: str) -> None:
    with _loading:
        if load := _left.pop(name, None):
            load()
            if name == HAS_TAKEN:
                module, torch = sys.modules[name], sys.modules["torch"]
                vars(torch).update({taken: getattr(module, taken) for taken in TAKEN})


def _load_all() -> None:
    for name in [*_left]:
        _load(name)


class _OnUse(ModuleType):
    """A module that is run when it is asked for what it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        if name in TAKEN and name not in vars(sys.modules["torch"]):

            def taken(*args: Any, **kwargs: Any) -> Any:
                return getattr(self, name)(*args, **kwargs)

            return taken
        _load(self.__name__)
        with _loading:
            return super().__getattribute__(name)


def _put_off() -> None:
    """Leave some modules empty until they are needed."""
    from importlib.machinery import PathFinder

    find = PathFinder.find_spec

    def find_later(name: str, path: Any = None, target: Any = None) -> Any:
        if name in NEEDS_THEM:
            PathFinder.find_spec = find
            _load_all()
        _load(name.rpartition(".")[0])
        spec = find(name, path, target)
        if name in (*PUT_OFF, *ON_USE) and spec and spec.loader:
            run = spec.loader.exec_module

            def run_later(module: ModuleType) -> None:
                _left[name] = lambda: run(module)
                if name in ON_USE:
                    module.__class__ = _OnUse

            spec.loader.exec_module = run_later
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
