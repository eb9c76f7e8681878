"""Import this before torch, and torch has no compiler.

Optimizers and DDP import it though they compile nothing, which takes longer than all the rest.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class _NoCompiler(ModuleType):
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    def disable(self, fn: Any, recursive: bool = True, *, wrapping: bool = True) -> Any:
        return fn

    def graph_break(self) -> None:
        """Nothing is compiled."""


if "torch" not in sys.modules:  # As in a fork of a zygote, which has imported all of it.
    sys.modules["torch._dynamo"] = _NoCompiler("torch._dynamo")
