"""Passes workers' output from their nodes to readers through the server.

A *reader* asks each node that may have output for a piece (`ReadLog`), on the stream that the node
has opened, and asks for the next one when its caller has taken that. So one piece of each node is
held here, and a slow reader delays only itself. Each request says how far the reader has come; so a
node that has reconnected is asked again, and goes on where it was.

With `follow`, nodes are also asked when they join a round, and wait for new output before they
answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rdzv import errors
from rdzv.bounds import LOG_PIECE_BYTES
from rdzv.core.model import Membership, Round, State, is_placeholder
from rdzv.messages import LogPiece, LogPosition, LogsWanted, ReadLog, StopLog
from rdzv.runtime.clock import Clock
from rdzv.server.diagnosis.node_requests import GoneError, NodeRequests, Send
from rdzv.structs import replace
from rdzv.transport.wire import convert
from rdzv.view.answers import LogLines

READERS = 32
"""The number of callers that read logs at once. Up to `BUFFER_BYTES` may wait for each."""

BUFFER_BYTES = 4 * 1024 * 1024
"""The size of the logs that wait for one slow reader, over all nodes."""

PIECE_BYTES_LEAST = 4 * 1024
"""The size of a piece if many nodes share `BUFFER_BYTES`."""

ANSWER_MS = 10_000
"""How long a node that is asked for logs may send nothing or be away: longer than the default
lease."""

WAIT_MS = 15_000
"""How long a node waits for new output before it answers that there is none."""


class WorkerLogs:
    """One server's log readers and their requests."""

    def __init__(self, clock: Clock, requests: NodeRequests, send: Send) -> None:
        self.clock, self.requests = clock, requests
        self.expects_until_ms = clock.now_ms() + ANSWER_MS
        """The time until which nodes may still be reconnecting to a server that has just
        started."""
        self.send = send
        self._readers: dict[LogReader, None] = {}

    @property
    def statistics(self) -> tuple[int, int]:
        return len(self._readers), len(self.requests.unanswered)

    def open(self, state: State, wanted: LogsWanted) -> LogReader:
        """Ask a job's nodes for logs, and return the reader, which the caller must close."""
        _check(state.membership, wanted)
        if len(self._readers) >= READERS:
            raise errors.LimitExceededError(
                f"{len(self._readers)} callers read logs here, which is the limit; try again later"
            )
        reader = LogReader(self, state, wanted)
        self._readers[reader] = None
        return reader

    def note_state(self, state: State) -> None:
        for reader in self._readers:
            if reader.rdzv_id == state.membership.rdzv_id:
                reader.note_state(state)

    def note_connected(self, node_id: str) -> None:
        for reader in self._readers:
            reader.note_connected(node_id)

    def close(self, error: errors.RendezvousError) -> None:
        for reader in self._readers:
            reader.fail(error)

    def discard(self, reader: LogReader) -> None:
        self._readers.pop(reader, None)


def _check(membership: Membership, wanted: LogsWanted) -> None:
    name, last = membership.rdzv_id, membership.round
    if wanted.run and wanted.run != membership.run:
        raise errors.RendezvousClosedError(
            f"run {wanted.run} of {name} has ended, and another has begun: run {membership.run}; "
            "read that one"
        )
    if wanted.follow and membership.ended is None:
        return
    if last is None:
        raise errors.InvalidRequestError(
            f"{name} has had no round yet, so nothing was written; use --follow to wait for output"
        )
    if wanted.round is not None and wanted.round > last.number:
        raise errors.InvalidRequestError(
            f"{name} has had no round {wanted.round}; its last is {last.number}"
        )
    of_last = wanted.round in (None, last.number)
    if of_last and wanted.rank is not None and wanted.rank >= last.world_size:
        raise errors.InvalidRequestError(_no_rank(name, wanted.rank, last))


def _no_rank(name: str, rank: int, round_: Round) -> str:
    last = round_.world_size - 1
    ranks = f"its RANKs are 0 to {last}" if last else "its only RANK is 0"
    return f"{name} has no RANK {rank} in round {round_.number}; {ranks}"


class _NoMoreError(Exception):
    """Nothing more is read from a node; the text says why."""


@dataclass(slots=True, eq=False)
class _Node:
    node_id: str
    round: int | None
    """The round that is being read, or None before the first piece."""
    failed: bool = False
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it may be of use to ask the node again."""
    task: asyncio.Task[None] | None = None
    """Reads from it; None once all has been read."""


class LogReader:
    """Streams the output of some workers to one caller. Use `WorkerLogs.open` to create one."""

    def __init__(self, logs: WorkerLogs, state: State, wanted: LogsWanted) -> None:
        membership = state.membership
        self.rdzv_id = membership.rdzv_id
        self._logs = logs
        self._wanted = wanted
        self._run = membership.run
        self._runs = (membership.run, *(one.run for one in reversed(membership.earlier)))
        """The runs of this job, which nodes may still have; another job of its name had others."""
        self._over = membership.ended is not None
        self._nodes: dict[str, _Node] = {}
        self._came: deque[tuple[LogLines, asyncio.Future[None]]] = deque()
        """What the caller has not taken yet, and whom to tell once it has."""
        self._absence = ""
        """Why there is nothing to read yet, if the caller has not been told."""
        self._looked_at: int | None = None
        """The last round checked for the wanted RANK; -1 if there was no round, None if not checked
        yet."""
        self._anything = False
        """Whether any wanted output has arrived, or a note on why a node sends none."""
        self._error: errors.RendezvousError | None = None
        self._news = asyncio.Event()
        last = membership.round
        self._first = membership.next_round
        if wanted.round is not None:
            self._first = wanted.round
        elif last is not None:
            self._first = last.number
        candidates = _candidates(state, self._first, wanted.rank)
        positions = by_node(wanted.positions)
        share = BUFFER_BYTES // max(len(candidates), 1)
        self._piece_bytes = min(LOG_PIECE_BYTES, max(share, PIECE_BYTES_LEAST))
        for node_id in {**dict.fromkeys(candidates), **positions}:
            round_, places = positions.get(node_id, (None, ()))
            self._read(node_id, round_, places, expected=wanted.follow or node_id in state.away)
        self._say_if_absent(state)

    # ---------------------------------------------------------------- the caller's side

    async def next(self) -> LogLines | None:
        """Return the next lines or note, or None after the end."""
        while True:
            self._news.clear()
            if self._error is not None:
                raise self._error
            if self._absence:
                note, self._absence = self._absence, ""
                return LogLines("", self._run, note=note)
            if self._came:
                lines, taken = self._came.popleft()
                taken.cancel()
                return lines
            if self._no_more():
                self._check_anything()
                return None
            await self._news.wait()

    def _no_more(self) -> bool:
        if any(node.task is not None for node in self._nodes.values()):
            return False
        useless = bool(self._nodes) and all(node.failed for node in self._nodes.values())
        return self._over or not self._wanted.follow or useless

    def close(self) -> None:
        self._logs.discard(self)
        for node in self._nodes.values():
            if node.task is not None:
                node.task.cancel()

    def fail(self, error: errors.RendezvousError) -> None:
        self._error = error
        self._news.set()

    def _check_anything(self) -> None:
        if not self._anything and not self._wanted.follow:
            who = f"RANK {self._wanted.rank}" if self._wanted.rank is not None else "a worker"
            raise errors.InvalidRequestError(
                f"no node that is connected has had {who} in round {self._first} of "
                f"{self.rdzv_id}; on a node that has gone its files are in "
                f"{self.rdzv_id}-{self._run}/NODE_ID/round_{self._first} in its --log-dir"
            )

    # ---------------------------------------------------------------- the job and its nodes

    def note_state(self, state: State) -> None:
        if not self._wanted.follow or self._over:
            return
        membership = state.membership
        if membership.run != self._run or membership.ended is not None:
            self._over = True
            for node in self._nodes.values():
                node.connected.set()
            self._news.set()
        elif membership.round is not None and membership.round.number >= self._first:
            for node_id in _candidates(state, membership.round.number, self._wanted.rank):
                self._read_in_round(node_id, membership.round.number)
            self._say_if_absent(state)

    def _say_if_absent(self, state: State) -> None:
        """Notify the caller once per round if the wanted round or RANK does not exist yet."""
        round_, wanted = state.membership.round, self._wanted
        number = -1 if round_ is None else round_.number
        if not wanted.follow or number == self._looked_at:
            return
        self._looked_at = number
        if round_ is None:
            text = f"{self.rdzv_id} has had no round yet"
        elif round_.number < self._first:
            text = f"{self.rdzv_id} has had no round {self._first} yet; its last is {round_.number}"
        elif wanted.rank is not None and wanted.rank >= round_.world_size:
            text = _no_rank(self.rdzv_id, wanted.rank, round_)
        else:
            self._absence = ""
            return
        self._absence = f"{text}; its output is shown once it exists"
        self._news.set()

    def _read_in_round(self, node_id: str, number: int) -> None:
        node = self._nodes.get(node_id)
        if node is None:
            self._read(node_id, self._first, (), expected=True)
        elif node.task is None and not node.failed and (node.round is None or number > node.round):
            self._read(node_id, number, (), expected=True)

    def note_connected(self, node_id: str) -> None:
        if (node := self._nodes.get(node_id)) is not None:
            node.connected.set()

    # ---------------------------------------------------------------- one node

    def _read(
        self,
        node_id: str,
        round_: int | None,
        positions: tuple[LogPosition, ...],
        *,
        expected: bool,
    ) -> None:
        """Read from a node to its end; with `expected`, wait for it if it is away."""
        wanted, fresh = self._wanted, not positions
        asked = ReadLog(
            request=self._logs.requests.next_number(),
            rdzv_id=self.rdzv_id,
            round=self._first if round_ is None else round_,
            rank=wanted.rank,
            stdout=wanted.stdout,
            stderr=wanted.stderr,
            follow=wanted.follow,
            tail_bytes=wanted.tail_bytes if fresh else 0,
            tail_lines=wanted.tail_lines if fresh else 0,
            max_bytes=self._piece_bytes,
            positions=positions,
            runs=self._runs,
        )
        node = self._nodes[node_id] = _Node(node_id, round_)
        node.task = asyncio.create_task(self._read_all(node, asked, expected=expected))

    async def _read_all(self, node: _Node, asked: ReadLog, *, expected: bool) -> None:
        last = False
        try:
            while not last:
                piece = await self._ask(node, asked, expected=expected)
                last = piece.last
                node.failed = last and bool(piece.error)
                await self._take(node, piece)
                expected = True
                asked = replace(
                    asked,
                    round=piece.round,
                    positions=piece.positions,
                    tail_bytes=0,
                    tail_lines=0,
                    wait_ms=WAIT_MS if asked.follow else 0,
                )
        except _NoMoreError as error:
            node.failed = True
            await self._pass_on(LogLines(node.node_id, self._run, note=str(error)))
        finally:
            node.task = None
            self._news.set()
            if not last:
                self._logs.send(node.node_id, StopLog(asked.request))

    async def _ask(self, node: _Node, asked: ReadLog, *, expected: bool) -> LogPiece:
        noted = False
        while True:
            node.connected.clear()
            try:
                within_ms = asked.wait_ms + ANSWER_MS
                piece = await self._logs.requests.ask(node.node_id, asked, LogPiece, within_ms)
            except TimeoutError:
                seconds = within_ms / 1000
                raise _NoMoreError(
                    f"it has sent nothing for {seconds:g} s: its agent may be held up; "
                    f"{self._where(node)}"
                ) from None
            except GoneError:
                absent = f"its agent is not connected; {self._where(node)}"
            else:
                if len(piece.data) > asked.max_bytes:
                    raise _NoMoreError("it is sending more than was requested; the rest is dropped")
                return piece
            may_return = not self._over or self._logs.clock.now_ms() < self._logs.expects_until_ms
            if not expected or not may_return:
                raise _NoMoreError(absent)
            try:
                async with self._logs.requests.within(ANSWER_MS):
                    await node.connected.wait()
            except TimeoutError:
                if not self._wanted.follow or self._over:
                    raise _NoMoreError(absent) from None
                # Reading continues if the node returns.
                if not noted:
                    noted = True
                    await self._pass_on(LogLines(node.node_id, self._run, note=absent))
                await node.connected.wait()

    async def _take(self, node: _Node, piece: LogPiece) -> None:
        """Pass on a piece; one without data counts only if it begins a round."""
        if piece.error:
            note = LogLines(node.node_id, self._run, note=piece.error)
            await self._pass_on(note)
        if piece.data or (not piece.last and node.round != piece.round):
            lines = convert(LogLines, piece, node_id=node.node_id, run=self._run)
            await self._pass_on(lines)
        if not piece.last:
            node.round = piece.round

    async def _pass_on(self, lines: LogLines) -> None:
        self._anything = True
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._came.append((lines, taken))
        self._news.set()
        await asyncio.wait([taken])

    def _where(self, node: _Node) -> str:
        number = self._first if node.round is None else node.round
        folder = f"{self.rdzv_id}-{self._run}/{node.node_id}/round_{number}"
        return f"the output of its workers is on that node, in {folder} in its --log-dir"


def _candidates(state: State, number: int, rank: int | None) -> list[str]:
    """Return the nodes, other than placeholders, that may have a round's output.

    The participants in rounds before the last are unknown here; only the nodes themselves know.
    """
    last = state.membership.round
    if last is None or number > last.number:
        return []
    if number < last.number:
        present = (*state.seats, *state.waiting, *state.stuck)
        found = dict.fromkeys((*(p.node_id for p in last.participants), *present))
        return [node_id for node_id in found if not is_placeholder(node_id)]
    return [
        p.node_id
        for p in last.participants
        if not is_placeholder(p.node_id) and (rank is None or rank in p.ranks)
    ]


def by_node(positions: Iterable[LogPosition]) -> dict[str, tuple[int, tuple[LogPosition, ...]]]:
    """Group positions by node; if a node has several rounds, only the latest counts."""
    found: dict[str, tuple[int, tuple[LogPosition, ...]]] = {}
    for at in positions:
        round_, places = found.get(at.node_id, (at.round, ()))
        if at.round > round_:
            round_, places = at.round, ()
        if at.round == round_:
            places = (*places, replace(at, node_id=""))
        found[at.node_id] = round_, places
    return found
