"""Nodes that take submitted jobs: the real ledger and agent core, joined by a model.

`Daemon` does what `rdzv.agent.node.placements` does: it takes up the jobs that the server places on
it, each as a part, waits for its places and GPUs, declines jobs that cannot run here, and reports
the jobs that it holds.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv.agent.core import events
from rdzv.agent.core.model import Phase
from rdzv.agent.node.gpu_assignments import GpuLedger
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.node_drain import Event
from rdzv.core.commands import Decline
from rdzv.core.fleet.node_resources import gpus_needed
from rdzv.errors import InvalidRequestError
from rdzv.messages import Holding, Holdings, Placed, Withdrawn
from rdzv.transport.wire import read, write
from rdzv.v1 import rdzv_pb2 as pb
from tests.sim.agents import Agent, NodeSpec, Part

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(eq=False)
class Held:
    """One job that a node holds."""

    placed: Placed
    gpus: int
    part: Part | None = None
    ready: bool = False
    """Whether only a place and GPUs are missing."""
    starting: bool = False
    given_back: bool = False
    gone: bool = False


class Daemon(Agent):
    """One start of an rdzv-agent that takes submitted jobs."""

    def __init__(self, world: World, spec: NodeSpec, instance: str) -> None:
        super().__init__(world, spec, instance)
        assert spec.resources is not None
        self.resources = spec.resources
        self.held: list[Held] = []
        self._ledger = GpuLedger.of(spec.resources)
        self._leaving = False

    def begin(self, rdzv_ids: tuple[str, ...]) -> None:
        """Wait for jobs to be placed here."""
        self.connect()

    # -------------------------------------------------------------- what the server says

    def _deliver(self, message: pb.ServerMessage) -> None:
        if message.HasField("placed"):
            placed = read(Placed, message.placed)
            self.world.judge.told_placed(self, placed)
            self._take_up(placed)
        elif message.HasField("withdrawn"):
            self.world.count("told withdrawn")
            withdrawn = read(Withdrawn, message.withdrawn)
            run, reason = withdrawn.run, withdrawn.reason
            self.world.note(f"{self.instance} hears that {run} is withdrawn: {reason}")
            for held in [h for h in self.held if h.placed.run == run]:
                self._give_back(held, withdrawn)
        else:
            super()._deliver(message)

    def _take_up(self, placed: Placed) -> None:
        """Take up a job, unless it has already been taken up."""
        known = [held for held in self.held if held.placed.key == placed.key]
        if (
            self._leaving
            or self.drain.present is not None
            or any(not held.given_back for held in known)
        ):
            return
        self.world.note(f"{self.instance} takes up {placed.rdzv_id} ({placed.run})")
        held = Held(placed, gpus_needed(placed.spec, self.resources))
        self.held.append(held)
        self._say_holdings()
        self._later((0, 5, 50), partial(self._check, held))

    def _later(self, in_ms: tuple[int, ...], do: Any) -> None:
        self.world.agenda.after(self.world.random.choice(in_ms), lambda: self.awake(do))

    def _check(self, held: Held) -> None:
        if held.gone or held.given_back:
            return
        try:
            self._ledger.check(held.gpus)
        except InvalidRequestError as error:
            self._decline(held, str(error))
            return
        if self.world.happens("declines"):
            self._decline(held, "there is no such folder")
            return
        held.ready = True
        self._grant()

    def _decline(self, held: Held, reason: str) -> None:
        self.world.count("agent: declines")
        self.say(encoding.report(Decline("", held.placed.run, reason), held.placed.rdzv_id))
        self._let_go(held)

    def _grant(self) -> None:
        """Give free places and GPUs to waiting jobs."""
        for held in self.held:
            waits = held.ready and not held.starting and not held.given_back
            if waits and not self._is_behind(held):
                if self._ledger.take(held, held.gpus) is None:
                    self.world.count("agent: waits for a place or GPUs")
                else:
                    held.starting = True
                    self._later((1, 100, 1_500), partial(self._start_part, held))

    def _is_behind(self, held: Held) -> bool:
        """Return whether something of an earlier run of the same job is left here."""
        before = self.held[: self.held.index(held)]
        return any(other.placed.rdzv_id == held.placed.rdzv_id for other in before)

    def _start_part(self, held: Held) -> None:
        if held.gone or held.given_back:
            return
        rdzv_id = held.placed.rdzv_id
        held.part = part = Part(self, rdzv_id, held.placed.run)
        self.parts[rdzv_id] = part
        if self.greeted:
            part.post(events.ServerConnected())
        part.post(events.Ticked())
        if part.state.phase is Phase.JOINING:
            # If a stream is open, its Hello did not include this job.
            part.say_join()

    # -------------------------------------------------------------- how it ends

    def _tell_notice(self, event: Event) -> None:
        for held in list(self.held):
            if isinstance(event, events.NoticeLifted):
                part = held.part
                if part is not None and part.outcome is None and part.state.leaving is None:
                    held.given_back = False
                continue
            first, held.given_back = not held.given_back, True
            if first and held.part is None:
                self._later((0, 20), partial(self._let_go, held))
        super()._tell_notice(event)

    def _give_back(self, held: Held, event: events.Event) -> None:
        first, held.given_back = not held.given_back, True
        if held.part is not None and held.part.outcome is None:
            held.part.post(event)
        elif first and held.part is None:
            self._later((0, 20), partial(self._let_go, held))

    def ended(self, part: Part) -> None:
        """Release the job once its runner has ended, too."""
        self.world.judge.exited(part)
        for held in self.held:
            if held.part is part:
                outcome = part.outcome
                assert outcome is not None
                if outcome.result is None and not part.joined and not held.given_back:
                    self.say(
                        encoding.report(Decline("", held.placed.run, outcome.text), part.rdzv_id)
                    )
                self._later((0, 20, 400), partial(self._let_go, held))

    def _let_go(self, held: Held) -> None:
        """Note that nothing of a job is left."""
        if held.gone:
            return
        held.gone = True
        self.held.remove(held)
        # Nothing of it is repeated: it may be placed here again, under the same run.
        self.said = [message for message in self.said if _run_of(message) != held.placed.run]
        if held.part is not None:
            del self.parts[held.placed.rdzv_id]
        self._ledger.release(held)
        self._say_holdings()
        self._grant()
        self._end_if_idle()

    def signal(self) -> None:
        """Leave all jobs in order, and then end."""
        self._leaving = True
        for held in list(self.held):
            self._give_back(held, events.Signalled(int(signal.SIGTERM), "SIGTERM"))
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._leaving and not self.held and self.alive:
            self.alive = False
            if self.connection is not None:
                self.connection.end_by_node()
                self.connection = None
            self.world.buried(self)

    # -------------------------------------------------------------- what it says

    def repeat(self) -> None:
        """Repeat nothing about a job that it has not taken part in."""
        runs = {held.placed.run for held in self.held if held.part is not None}
        self.said = [message for message in self.said if _run_of(message) in runs]
        super().repeat()

    def _say_holdings(self) -> None:
        if self.connection is not None:
            self.connection.up(pb.NodeMessage(holdings=self._holdings()))

    def _holdings(self) -> pb.Holdings:
        held = {h.placed.key: Holding(h.placed.rdzv_id, h.placed.run, h.gpus) for h in self.held}
        return write(pb.Holdings(), Holdings(tuple(held.values())))

    def _hello(self) -> pb.Hello:
        hello = super()._hello()
        hello.resources.CopyFrom(write(pb.Resources(), self.resources))
        hello.holdings.CopyFrom(self._holdings())
        return hello


def _run_of(message: pb.NodeMessage) -> str:
    run: str = getattr(message, message.WhichOneof("body") or "").run
    return run
