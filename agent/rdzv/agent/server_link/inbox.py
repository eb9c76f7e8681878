"""Delivers the server's messages on the open stream to jobs, placements and log readers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping

from rdzv.agent.output.worker_log_reader import WorkerLogReader
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.node_drain import NodeDrain
from rdzv.agent.server_link.ports import JobPort, PlacementPort
from rdzv.messages import Key, Placed, ReadLog, TakeStacks
from rdzv.runtime.clock import monotonic_ms
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.agent")


class Inbox:
    """Delivers the server's messages, except those about the stream itself."""

    def __init__(
        self,
        jobs: Mapping[str, JobPort],
        placements: Callable[[], PlacementPort | None],
        declined: MutableMapping[Key, str],
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

    def take(self, message: pb.ServerMessage) -> None:
        placements = self._placements()
        match message.WhichOneof("body"):
            case "read_log":
                self._log_reader.read(read(ReadLog, message.read_log))
            case "stop_log":
                self._log_reader.stop(message.stop_log.request)
            case "take_stacks":
                self._take_stacks(read(TakeStacks, message.take_stacks))
            case "look_again":
                if placements is not None:
                    placements.look_again()
            case "drain":
                drain = message.drain
                self._drain.take_from_server(drain.number, drain.left_ms, drain.reason)
            case "undrain":
                self._drain.lift()
            case "placed" | "withdrawn":
                self._deliver_placement(message, placements)
            case _:
                self._deliver(message)

    def _take_stacks(self, asked: TakeStacks) -> None:
        if (job := self._jobs.get(asked.rdzv_id)) is not None:
            job.take_stacks(asked)
        else:
            error = "it no longer takes part in this job"
            self._say(encoding.stacks(asked.request, (), last=True, error=error))

    def _deliver_placement(
        self, message: pb.ServerMessage, placements: PlacementPort | None
    ) -> None:
        if placements is None:
            rdzv_id = encoding.rdzv_id_of(message)
            log.warning("the server placed %s on this node, which takes no submitted jobs", rdzv_id)
        elif message.HasField("placed"):
            placements.placed(read(Placed, message.placed))
        else:
            job = message.withdrawn
            self._declined.pop((job.rdzv_id, job.run), None)
            placements.withdrawn(job.rdzv_id, job.run, job.reason)

    def _deliver(self, message: pb.ServerMessage) -> None:
        job = self._jobs.get(encoding.rdzv_id_of(message))
        if job is None and message.HasField("round_completed"):
            # The seat was requested by a driver that is now gone, so it is given back here.
            self._say(encoding.gone(message.round_completed))
        elif job is None:
            log.debug("received a message for a job that is not on this node: %s", message)
        elif message.HasField("waiting"):
            job.note(message.waiting.reason)
        else:
            event = encoding.event(message, monotonic_ms())
            if event is not None:
                job.post(event)
