"""Delivers the server's messages on the open stream to jobs, placements and log readers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, get_args

from rdzv import messages
from rdzv.agent.core import events
from rdzv.agent.server_link import encoding
from rdzv.core.commands import Leave
from rdzv.core.fleet.node_resources import FailingCheck, NodeResources
from rdzv.core.model import Assignment, LeaveCause
from rdzv.v1 import rdzv_pb2 as pb

if TYPE_CHECKING:
    from rdzv.agent.server_link.link import ServerLink

log = logging.getLogger("rdzv.agent")

_OF_A_JOB = get_args(events.FromServer)


class JobPort(Protocol):
    """A job driver, as the link uses it."""

    rdzv_id: str
    fence_after_ms: int
    """How long workers may run without proof that the server hears this node; 0: no limit."""

    def renew_fence(self, heard_at_ms: int) -> None:
        """The server heard this node at this time of `boottime_ms`, or later."""

    def belief(self) -> pb.Belief | None: ...
    def post(self, event: events.Event) -> None: ...
    def waits_ms(self) -> int | None: ...
    def note(self, reason: str) -> None: ...
    def take_stacks(self, asked: messages.TakeStacks) -> None: ...


class PlacementPort(Protocol):
    """This node's submitted jobs, as the link uses them."""

    @property
    def resources(self) -> NodeResources: ...
    @property
    def failing(self) -> tuple[FailingCheck, ...]: ...
    def holdings(self) -> tuple[messages.Holding, ...]: ...
    def placed(self, placed: messages.Placed) -> None: ...
    def withdrawn(self, withdrawn: messages.Withdrawn) -> None: ...
    def look_again(self) -> None: ...
    def noticed(self, event: events.NoticeGiven | events.NoticeLifted) -> None: ...


def deliver(link: ServerLink, announcement: messages.Announcement | None) -> None:
    """Deliver a message, unless it is about the stream itself."""
    placements = link.placements
    match announcement:
        case messages.ReadLog():
            link.log_reader.read(announcement)
        case messages.StopLog():
            link.log_reader.stop(announcement.request)
        case messages.ReadMetrics():
            link.say(encoding.report(messages.NodeMetrics(announcement.request, link.metrics())))
        case messages.LookAgain():
            if placements is not None:
                placements.look_again()
        case messages.DrainNode():
            link.drain.take_from_server(
                announcement.number, announcement.left_ms, announcement.reason
            )
        case messages.UndrainNode():
            link.drain.lift()
        case messages.Placed() if placements is not None:
            placements.placed(announcement)
        case messages.Withdrawn() if placements is not None:
            link.declined.pop((announcement.rdzv_id, announcement.run), None)
            placements.withdrawn(announcement)
        case messages.Placed() | messages.Withdrawn():
            text = "the server placed %s on this node, which takes no submitted jobs"
            log.warning(text, announcement.rdzv_id)
        case _:
            _deliver_to_job(link, announcement)


def _deliver_to_job(link: ServerLink, announcement: messages.Announcement | None) -> None:
    job = link.jobs.get(getattr(announcement, "rdzv_id", ""))
    match announcement:
        case messages.TakeStacks() if job is None:
            error = "it no longer takes part in this job"
            link.say(encoding.report(messages.Stacks(announcement.request, last=True, error=error)))
        case Assignment() if job is None:
            # The seat was requested by a driver that is now gone, so it is given back here.
            reason = "it left before it received the round"
            gone = Leave("", 0, announcement.run, LeaveCause.SIGNAL, reason, announcement.round)
            link.say(encoding.report(gone, announcement.rdzv_id))
        case _ if job is None:
            log.debug("received a message for a job that is not on this node: %s", announcement)
        case messages.TakeStacks():
            job.take_stacks(announcement)
        case messages.Waiting():
            job.note(announcement.reason)
        case _ if isinstance(announcement, _OF_A_JOB):
            job.post(announcement)
