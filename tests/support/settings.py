"""rdzvd's settings for a server in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.transport.endpoints import Listen


def rdzvd_settings(**given: Any) -> RdzvdSettings:
    """Return settings for a free port of loopback and, unless `given`, no folder."""
    listen = Listen("127.0.0.1", 0)
    return RdzvdSettings(**{"listen": listen, "data_dir": Path("/nowhere"), **given})
