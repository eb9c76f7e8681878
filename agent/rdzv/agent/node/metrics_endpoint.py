"""The agent's /metrics and /healthz; the metrics library is loaded only if they are served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdzv.agent.job.job_driver import JobDriver
    from rdzv.agent.node.placements import Placements
    from rdzv.agent.server_link.link import ServerLink
    from rdzv.transport.endpoints import Listen


@asynccontextmanager
async def metered(
    listen: Listen | None,
    link: ServerLink,
    placements: Placements | None = None,
    drivers: Sequence[JobDriver] = (),
) -> AsyncIterator[None]:
    """Collect metrics, and serve /metrics and /healthz at `listen` until the body ends.

    Does nothing if `listen` is None. Enter it before the link runs and before any driver prepares.

    Raises:
        InvalidRequestError: the address cannot be bound.
    """
    if listen is None:
        yield
        return
    from rdzv.agent.node.agent_metrics import serving_metrics

    async with serving_metrics(listen, link, placements, drivers):
        yield
