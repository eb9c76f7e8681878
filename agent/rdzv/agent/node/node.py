"""One node: its stream to the server, and all its jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from rdzv.agent.core import events
from rdzv.agent.inventory.preemption import Preemption, reporting_preemptions
from rdzv.agent.job.job_driver import JobDriver
from rdzv.agent.launch.launch import Launch
from rdzv.agent.node.server_hosting import serving_if_elected, serving_itself, serving_others
from rdzv.agent.runner_link.runner_link import StartedRunner
from rdzv.agent.server_link.link import NodeIdentity, ServerLink
from rdzv.agent.workers.fates import NodeOutcome
from rdzv.core.fleet.nodes import AgentKind
from rdzv.runtime.tasks import single_error
from rdzv.structs import replace
from rdzv.transport.channels import Credentials
from rdzv.transport.node_stream import OWN_SERVER_OPTIONS, STREAM_OPTIONS
from rdzv.version import VERSION

if TYPE_CHECKING:
    from rdzv.agent.cli.backends import Meeting
    from rdzv.agent.handover.runner_adoption import NodeInstance

STEP_SIGNAL = signal.SIGURG
"""Like SIGTERM, for schedulers that signal every process of a step: others ignore it."""

LOG_FINISH_TIMEOUT_S = 2.0
"""How long log readers may take to get the last lines once the jobs have ended."""

LINK_CLOSE_TIMEOUT_S = 2.0
"""How long the stream may take to close once everything has been sent."""

log = logging.getLogger("rdzv.agent")


async def take_part(
    meeting: Meeting,
    launches: Sequence[Launch],
    credentials: Credentials,
    *,
    preemption: Preemption | None = None,
    started: StartedRunner | None = None,
) -> list[NodeOutcome]:
    """Take part in these jobs until each has ended for this node, with all its processes gone.

    The launches' signals make the node leave all of the jobs in order, and so does a notice from
    `preemption` or from a launch's preemption file.

    `credentials` are for servers at the endpoints. `started` is a runner for the first launch.
    """
    drivers: list[JobDriver] = []
    servers, job, local_addr = meeting.endpoints, launches[0].job, launches[0].local_addr
    with single_error():
        async with contextlib.AsyncExitStack() as stack:
            signals = {signum for launch in launches for signum in launch.signals}
            early = stack.enter_context(_signals_to(drivers, signals))
            if not meeting.endpoints:
                own = serving_itself(meeting.host_at, job.rdzv_id)
                servers = (await stack.enter_async_context(own),)
            elif meeting.host_at is not None:
                # The static back-end names the only node that may serve.
                alone = bool(meeting.node_id)
                others = serving_others(meeting.host_at, job.rdzv_id, alone=alone)
                await stack.enter_async_context(others)
            if meeting.elect_by is not None:
                elected = serving_if_elected(meeting.elect_by, local_addr)
                servers = (await stack.enter_async_context(elected),)
            options = STREAM_OPTIONS if meeting.endpoints else OWN_SERVER_OPTIONS
            own_identity = identity(job.node_id, local_addr)
            link = ServerLink(servers, own_identity, credentials=credentials, options=options)
            runners = [started, *[None] * (len(launches) - 1)]
            drivers += [
                JobDriver(launch, link, started=runner)
                for launch, runner in zip(launches, runners, strict=True)
            ]
            for signum in early:
                _post(signum, drivers)
            sources = {Preemption(launch.preemption_file) for launch in launches}
            for source in sources | {preemption or Preemption()}:
                await stack.enter_async_context(reporting_preemptions(source, link.drain_node))
            try:
                for driver in drivers:
                    await driver.prepare()
                return await _talk(link, drivers)
            finally:
                link.log_reader.stop_all()
                for driver in drivers:
                    await driver.close()


def identity(node_id: str, local_addr: str = "") -> NodeIdentity:
    return NodeIdentity(
        node_id=node_id,
        instance=uuid.uuid4().hex,
        # Unlike a daemon's workers, these workers end with their agent.
        kind=AgentKind.FOREGROUND,
        address=local_addr,
        pid=os.getpid(),
        version=VERSION,
    )


def daemon_identity(node_id: str, instance: NodeInstance) -> NodeIdentity:
    """Return a daemon's identity. Its workers outlive it, and it may continue an instance."""
    return replace(
        identity(node_id),
        kind=AgentKind.DAEMON,
        instance=instance.instance,
        incarnation=instance.incarnation,
        leadership=instance.leadership,
        lease_ms=instance.lease_ms,
    )


async def _talk(link: ServerLink, drivers: Sequence[JobDriver]) -> list[NodeOutcome]:
    async with asyncio.TaskGroup() as tasks:
        talk = tasks.create_task(link.run())
        outcomes = await asyncio.gather(*(driver.ended for driver in drivers))
        await link.log_reader.finish(LOG_FINISH_TIMEOUT_S)
        link.close()
        _, late = await asyncio.wait([talk], timeout=LINK_CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
    return outcomes


@contextlib.contextmanager
def _signals_to(
    drivers: Sequence[JobDriver], signals: Collection[signal.Signals]
) -> Iterator[Sequence[signal.Signals]]:
    """Post signals; yield those before the first driver. No Ctrl-C cuts a server's end short."""
    early: list[signal.Signals] = []

    def take(signum: signal.Signals) -> None:
        if not drivers:
            early.append(signum)
        _post(signum, drivers)

    loop = asyncio.get_running_loop()
    for signum in signals:
        loop.add_signal_handler(signum, take, signum)
    loop.add_signal_handler(STEP_SIGNAL, take, signal.SIGTERM)
    try:
        yield early
    finally:
        for signum in (*signals, STEP_SIGNAL):
            loop.remove_signal_handler(signum)


def _post(signum: signal.Signals, drivers: Sequence[JobDriver]) -> None:
    for driver in drivers:
        driver.post(events.Signalled(signum, signum.name))
