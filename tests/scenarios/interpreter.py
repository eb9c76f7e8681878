"""Runs a scenario: one job, and the nodes core where streams are spoken of.

A scenario is text. A line that begins with `#` is for people. A block is commands, `----`, and
the exact answer: one line for each command, one for each tick that fell due on the way (`at 5s
...`), and last where the job stands. `connect`, `disconnect`, `hear`, `plan-away` and `pause` go
to the nodes core; what that says to the job is passed on as a server would.

    new job-7 nodes=2:3 last_call=5s
    at 0s  join n1 workers=8
    ----
    RunBegan run-1: the first of this job · NodeJoined n1
    round 0 joining: n1 waiting; wakes at 600s

Every step is checked for its promises; see `Job`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rdzv.core.commands import MarkAway, MarkBack, MarkLost, Tick
from rdzv.core.events import Event
from rdzv.core.fleet import nodes
from rdzv.core.fleet.nodes import NodesCommand, NodesEvent
from rdzv.core.model import Tuning
from rdzv.errors import RendezvousError
from rdzv.view.job_status import view
from tests.scenarios import language
from tests.support.builders import SETTINGS, Job

SEPARATOR = "----"
Happened = Event | NodesEvent


@dataclass
class Block:
    """Commands as written, with the comments above them, and their answer."""

    lines: list[str]
    answer: list[str]

    @property
    def commands(self) -> list[str]:
        return [line for line in self.lines if not line.startswith("#")]


def read_blocks(text: str) -> Iterator[Block]:
    """Split a scenario at its blank lines."""
    for chunk in text.strip().split("\n\n"):
        lines = [line.rstrip() for line in chunk.strip().splitlines()]
        at = lines.index(SEPARATOR) if SEPARATOR in lines else len(lines)
        yield Block(lines[:at], lines[at + 1 :])


def answer(text: str) -> str:
    """Return the scenario with the present answers."""
    stage, chunks = Stage(), []
    for block in read_blocks(text):
        chunk = block.lines
        if block.commands:
            chunk = [*chunk, SEPARATOR, *stage.run(block.commands)]
        chunks.append("\n".join(chunk))
    return "\n\n".join(chunks) + "\n"


@dataclass
class Stage:
    """One job, the nodes around it, and the time."""

    job: Job = field(default_factory=Job)
    nodes: nodes.Nodes = field(default_factory=lambda: nodes.Nodes(leadership=1))
    streams: int = 0
    unheard: set[str] = field(default_factory=set)
    """Nodes with a new stream on which they have not sent their belief yet."""

    def run(self, commands: list[str]) -> list[str]:
        """Run the commands of one block."""
        written: list[str] = []
        for text in commands:
            try:
                written += self._command(text)
            except language.ScenarioError as error:
                raise language.ScenarioError(f"{text}: {error}") from error
        due = [t for t in (self.job.wake_at_ms, self.nodes.wake_at_ms) if t is not None]
        wakes = f"; wakes at {language.write_ms(min(due))}" if due else ""
        return [*written, language.write_state(self.job.state) + wakes]

    def _command(self, text: str) -> Iterator[str]:
        if text.startswith("at "):
            _, at, text = text.split(maxsplit=2)
            yield from self._pass_until(language.read_ms(at))
        line = language.Line.read(text)
        if line.verb == "new":
            self._new(line)
            return
        if line.verb == "status":
            yield from language.write_view(view(self.job.state, self.job.now_ms))
            return
        if line.verb == "tick":
            return  # Everything that was due has been ticked on the way.
        try:
            yield language.write_events(self._events(line))
        except RendezvousError as error:
            yield f"refused {error.code}: {error}"

    def _events(self, line: language.Line) -> tuple[Happened, ...]:
        match line.verb:
            case "crash":
                return self._crash()
            case "connect" | "disconnect" | "hear" | "plan-away" | "pause":
                return self._step_nodes(self._nodes_command(line))
            case _:
                return self._say(line)

    def _new(self, line: language.Line) -> None:
        name = line.word()
        settings = language.read_settings(line, SETTINGS)
        tuning, nodes_tuning = (
            language.read_tuning(line, Tuning),
            language.read_tuning(line, nodes.LeaseRules),
        )
        language.forget_tuning(line, Tuning)
        language.forget_tuning(line, nodes.LeaseRules)
        line.finish()
        self.job = Job(settings, tuning, name=name)
        self.nodes = nodes.Nodes(1, nodes_tuning)
        self.streams, self.unheard = 0, set()

    def _say(self, line: language.Line) -> tuple[Event, ...]:
        job = self.job
        said = language.Said(job.settings, job.membership.run, self._incarnation, job.now_ms)
        command = language.read_command(line, said)
        happened = job.do(command)
        node_id = getattr(command, "node_id", "")
        if node_id in self.unheard:
            self.unheard.discard(node_id)
            happened += self._mark(node_id)
        return happened

    def _incarnation(self, node_id: str) -> int:
        record = self.nodes.records.get(node_id)
        return record.incarnation if record else 1

    # -------------------------------------------------------------- time

    def _pass_until(self, at_ms: int) -> Iterator[str]:
        """Tick everything that is due, in order."""
        while True:
            due = [t for t in (self.job.wake_at_ms, self.nodes.wake_at_ms) if t is not None]
            if not due or min(due) > at_ms:
                break
            now_ms = min(due)
            ticks = self.job.pass_until(now_ms)
            happened: list[Happened] = [event for _, events in ticks for event in events]
            if self.nodes.wake_at_ms is not None and self.nodes.wake_at_ms <= now_ms:
                happened += self._step_nodes(Tick())
            if happened:
                yield f"at {language.write_ms(now_ms)}  {language.write_events(tuple(happened))}"
        self.job.pass_until(at_ms)

    # -------------------------------------------------------------- the nodes core

    def _nodes_command(self, line: language.Line) -> NodesCommand:
        if line.verb == "pause":
            return nodes.Pause()
        if line.verb == "hear":
            return nodes.Hear(frozenset(line.words))
        node_id, incarnation = language.speaker(line.word(), lambda _: 0)
        record = self.nodes.records.get(node_id)
        stream = line.number("stream", (record.stream if record else None) or 0)
        if line.verb == "disconnect":
            return nodes.Disconnect(node_id, stream)
        if line.verb == "plan-away":
            return nodes.PlanAway(node_id, stream, line.ms("for", 0))
        self.streams += 1
        return nodes.Connect(
            node_id=node_id,
            instance=line.take("instance", "a"),
            kind=nodes.AgentKind(line.take("kind", "daemon")),
            address=line.take("address", f"{node_id}.net"),
            pid=line.number("pid", 4711),
            stream=self.streams,
            incarnation=incarnation,
        )

    def _step_nodes(self, command: NodesCommand) -> tuple[Happened, ...]:
        transition = nodes.step(self.nodes, command, self.job.now_ms)
        self.nodes = transition.nodes
        wake_at_ms = transition.wake_at_ms
        if isinstance(command, Tick) and wake_at_ms is not None:
            assert wake_at_ms > self.job.now_ms, "the nodes core loops"
        happened: tuple[Happened, ...] = ()
        for event in transition.events:
            if isinstance(event, nodes.NodeConnected):
                self.unheard.add(event.node_id)
            reason = event.reason if isinstance(event, nodes.NodeGivenUp) else ""
            happened += (event, *self._mark(event.node_id, reason))
        return happened

    def _mark(self, node_id: str, reason: str = "") -> tuple[Event, ...]:
        """Inform the job about the present state of a node."""
        held = self.job.state.incarnation(node_id)
        record = self.nodes.records.get(node_id)
        if held is None:
            return ()
        if record is None:
            return self.job.do(MarkLost(node_id, held, reason))
        if record.incarnation != held:
            why = "a new instance of the node took its place"
            heard = record.stream is not None and node_id not in self.unheard
            return self.job.do(MarkLost(node_id, held, why)) if heard else ()
        if record.stream is None:
            return self.job.do(MarkAway(node_id, held, record.until_ms, record.firm))
        return self.job.do(MarkBack(node_id, held))

    def _crash(self) -> tuple[Event, ...]:
        """Another server takes over the durable state; no node is connected to it."""
        happened = self.job.crash()
        streams = bool(self.nodes.records)
        self.nodes = nodes.Nodes(self.nodes.leadership + 1, self.nodes.rules)
        self.unheard = set()
        for node_id, seat in self.job.state.seats.items() if streams else ():
            expect = nodes.Expect(node_id, seat.incarnation)
            self.nodes = nodes.step(self.nodes, expect, self.job.now_ms).nodes
        return happened
