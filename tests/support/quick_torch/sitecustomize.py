"""Found by each Python that a test starts: it makes an import of torch a third cheaper.

Nothing that torch creates during its import is garbage; without this, the collector searches all of
it repeatedly, and twice more when the process ends. There are hundreds of such imports.

If RDZV_TEST_NO_COMPILER names a file, that is run first: it takes the compiler from torch.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any


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

            spec.loader.exec_module = run_uncollected
        return spec


sys.meta_path.insert(0, _Torch)
