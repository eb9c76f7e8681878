"""Turns an interpreter into a zygote. Imported in place of the interpreter's own `sitecustomize`.

Found through PYTHONPATH while the interpreter is preparing to run a worker's script (zygote.py says
why). The zygote itself never reaches that script, because `main` returns only in workers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

_here = Path(__file__).absolute().parent
_zygote = _here.with_name("zygote.py")
_names: dict[str, Any] = {"__name__": "rdzv zygote", "__file__": str(_zygote)}
try:
    exec(compile(_zygote.read_bytes(), str(_zygote), "exec"), _names)
    _there_is_another = _names["main"](str(_here))
except BaseException as error:
    sys.stderr.write(f"rdzv zygote: {type(error).__name__}: {error}\n")
    os._exit(1)
if not _there_is_another:
    # It leaves no trace, as if this file had not been found.
    raise ImportError("there is no sitecustomize here", name="sitecustomize")
