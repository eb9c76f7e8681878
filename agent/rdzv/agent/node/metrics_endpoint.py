"""The agent's /metrics and /healthz; the metrics library is loaded only if they are served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdzv.agent.node.placements import Placements
    from rdzv.agent.server_link.link import ServerLink
    from rdzv.transport.endpoints import Listen


@asynccontextmanager
async def metered(
    listen: Listen | None, link: ServerLink, placements: Placements | None = None
) -> AsyncIterator[None]:
    """Serve /metrics and /healthz at `listen` until the body ends; do nothing if it is None.

    Raises:
        InvalidRequestError: the address cannot be bound.
    """
    if listen is None:
        yield
        return
    from rdzv.agent.node.agent_metrics import serving_metrics

    async with serving_metrics(listen, link, placements):
        yield
