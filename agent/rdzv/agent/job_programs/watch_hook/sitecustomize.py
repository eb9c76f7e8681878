"""Makes an interpreter report its import of torch to the runner (torch_watch.py).

Found through PYTHONPATH and imported in place of the interpreter's own `sitecustomize`. It undoes
everything that the script could notice, and then imports the original.
"""

from __future__ import annotations

import _frozen_importlib_external as _external
import os
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is slow.
_watch = os.path.join(os.path.dirname(_here), "torch_watch.py")  # noqa: PTH118, PTH120
_address, _colon, _path = os.environ.pop("RDZV_TORCH_WATCH", "").partition(":")
if _colon:
    os.environ["PYTHONPATH"] = _path
else:
    os.environ.pop("PYTHONPATH", None)
sys.path[:] = [entry for entry in sys.path if entry != _here]
sys.path_importer_cache.pop(_here, None)
del sys.modules["sitecustomize"]
try:
    # Any error, even a missing module, is handled as if this file did not exist.
    import_module("sitecustomize")
finally:
    try:
        _name = "rdzv torch watch"
        _names: dict[str, Any] = {"__name__": _name}
        _loader: Any = _external.SourceFileLoader(_name, _watch)
        exec(_loader.get_code(_name), _names)
        _names["watch"](_address)
    except Exception:  # noqa: S110  # The file may be gone after an upgrade; nothing is reported.
        pass
