"""Delivers the server's messages on the open stream to jobs, placements and log readers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import get_args

from rdzv import messages
from rdzv.agent.core import events
from rdzv.agent.output.worker_log_reader import WorkerLogReader
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.node_drain import NodeDrain
from rdzv.agent.server_link.ports import JobPort, PlacementPort
from rdzv.core.commands import Leave
from rdzv.core.model import Assignment, LeaveCause
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")

_OF_A_JOB = get_args(events.FromServer)


class Inbox:
    """Delivers the server's messages, except those about the stream itself."""

    def __init__(
        self,
        jobs: Mapping[str, JobPort],
        placements: Callable[[], PlacementPort | None],
        declined: MutableMapping[messages.Key, str],
        drain: NodeDrain,
        log_reader: WorkerLogReader,
        say: Callable[[pb.NodeMessage], None],
    ) -> None:
        """Deliver to these recipients, and use `say` to respond if a message's recipient is gone.

        A job that the server withdraws is removed from `declined`.
        """
        self._jobs = jobs
        self._placements = placements
        self._declined = declined
        self._drain = drain
        self._log_reader = log_reader
        self._say = say

    def take(self, told: messages.Announcement | None) -> None:
        placements = self._placements()
        match told:
            case messages.ReadLog():
                self._log_reader.read(told)
            case messages.StopLog():
                self._log_reader.stop(told.request)
            case messages.LookAgain():
                if placements is not None:
                    placements.look_again()
            case messages.DrainNode():
                self._drain.take_from_server(told.number, told.left_ms, told.reason)
            case messages.UndrainNode():
                self._drain.lift()
            case messages.Placed() | messages.Withdrawn():
                self._take_placement(told, placements)
            case _:
                self._deliver(told)

    def _take_placement(
        self, told: messages.Placed | messages.Withdrawn, placements: PlacementPort | None
    ) -> None:
        if placements is None:
            text = "the server placed %s on this node, which takes no submitted jobs"
            log.warning(text, told.rdzv_id)
        elif isinstance(told, messages.Placed):
            placements.placed(told)
        else:
            self._declined.pop((told.rdzv_id, told.run), None)
            placements.withdrawn(told)

    def _deliver(self, told: messages.Announcement | None) -> None:
        job = self._jobs.get(getattr(told, "rdzv_id", ""))
        match told:
            case messages.TakeStacks() if job is None:
                error = "it no longer takes part in this job"
                self._say(encoding.report(messages.Stacks(told.request, last=True, error=error)))
            case Assignment() if job is None:
                # The seat was requested by a driver that is now gone, so it is given back here.
                reason = "it left before it received the round"
                gone = Leave("", 0, told.run, LeaveCause.SIGNAL, reason, told.round)
                self._say(encoding.report(gone, told.rdzv_id))
            case _ if job is None:
                log.debug("received a message for a job that is not on this node: %s", told)
            case messages.TakeStacks():
                job.take_stacks(told)
            case messages.Waiting():
                job.note(told.reason)
            case _ if isinstance(told, _OF_A_JOB):
                job.post(told)
