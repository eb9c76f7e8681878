"""Passes workers' output from their nodes to readers through the server.

A *reader* asks each node that may have output (`ReadLog`), on the stream that the node has opened,
and passes on the pieces that come back. Only pieces in transit are held, and their number is
bounded: a node sends no more than it has *credit* for, and receives new credit as the reader
consumes the pieces. A slow reader therefore delays only itself.

With `follow`, a node that has reconnected is asked to continue where it stopped, and nodes are
asked for output when they join a round.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rdzv.core.model import Membership, Round, State, is_placeholder
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousClosedError,
    RendezvousError,
)
from rdzv.messages import (
    Announcement,
    LogCredit,
    LogPiece,
    LogPosition,
    LogsWanted,
    ReadLog,
)
from rdzv.runtime.clock import Clock, Timer
from rdzv.view.answers import LogLines

PIECE_COST = 256
"""The credit that a piece costs in addition to its data; this bounds the number of small pieces."""

Send = Callable[[str, Announcement], bool]
"""Sends an announcement to a node; returns False if the node has no stream."""


@dataclass(slots=True, eq=False)
class _Ask:
    """A reader's request to one node."""

    node_id: str
    request: int | None = None
    """The request's number, or None while the reader waits for the node to connect and after the
    node's last piece."""
    done: bool = False
    failed: bool = False
    """Whether the request has failed and must not be repeated."""
    credit: int = 0
    taken: int = 0
    """The credit that has been used and not yet renewed."""
    deadline_ms: int | None = None
    """The deadline for the node's next message."""
    round: int | None = None
    """The round that is being read."""
    offsets: dict[tuple[int, bool], int] = field(default_factory=dict)
    """The positions in that round's files, by LOCAL_RANK and whether the file is stderr."""


READERS = 32
"""The number of callers that read logs at once. Up to `BUFFER_BYTES` may wait for each."""

BUFFER_BYTES = 4 * 1024 * 1024
"""The size of the logs that wait for one slow reader, over all nodes."""

WINDOW_BYTES = 256 * 1024
"""How much one node sends ahead of one reader: four pieces, so that neither side waits."""

WINDOW_BYTES_LEAST = 4 * 1024
"""The same if many nodes share `BUFFER_BYTES`."""


ANSWER_MS = 10_000
"""How long a node that is asked for logs may send nothing or be away: longer than the default
lease."""


class WorkerLogs:
    """One server's log readers and their requests."""

    def __init__(self, clock: Clock, send: Send) -> None:
        self.clock = clock
        self.expects_until_ms = clock.now_ms() + ANSWER_MS
        """The time until which nodes may still be reconnecting to a server that has just
        started."""
        self._send = send
        self._readers: dict[LogReader, None] = {}
        self._asks: dict[int, tuple[LogReader, _Ask]] = {}
        self._numbers = itertools.count(1)

    @property
    def statistics(self) -> tuple[int, int]:
        """The number of readers, and the number of requests that nodes are currently answering."""
        return len(self._readers), len(self._asks)

    def open(self, state: State, wanted: LogsWanted) -> LogReader:
        """Ask a job's nodes for logs, and return the reader, which the caller must close.

        Raises:
            InvalidRequestError: the job has had no such round or no worker with that RANK.
            RendezvousClosedError: the given run has ended, and another has begun.
            LimitExceededError: there are too many readers.

        """
        _check(state.membership, wanted)
        if len(self._readers) >= READERS:
            raise LimitExceededError(
                f"{len(self._readers)} callers read logs here, which is the limit; try again later"
            )
        reader = LogReader(self, state, wanted)
        self._readers[reader] = None
        return reader

    def take(self, node_id: str, piece: LogPiece) -> None:
        """Pass on a piece that a node has sent, or drop it if no reader wants it."""
        reader, ask = self._asks.get(piece.request, (None, None))
        if reader is not None and ask is not None and ask.node_id == node_id:
            reader.take(ask, piece)

    def note_state(self, state: State) -> None:
        """Update the readers of a job that has changed, for example because a round completed."""
        for reader in self._readers:
            if reader.rdzv_id == state.membership.rdzv_id:
                reader.note_state(state)

    def note_connected(self, node_id: str) -> None:
        """Record that a node has opened a stream."""
        for reader in self._readers:
            reader.note_connected(node_id)

    def note_gone(self, node_id: str) -> None:
        """Record that a node's stream has ended."""
        for reader in self._readers:
            reader.note_gone(node_id)

    def close(self, error: RendezvousError) -> None:
        for reader in self._readers:
            reader.fail(error)

    # ---------------------------------------------------------------- for readers

    def ask(self, reader: LogReader, ask: _Ask, told: ReadLog) -> bool:
        if not self._send(ask.node_id, told):
            return False
        ask.request = told.request
        self._asks[told.request] = reader, ask
        return True

    def next_number(self) -> int:
        return next(self._numbers)

    def grant(self, ask: _Ask, credit: int) -> None:
        if ask.request is not None:
            self._send(ask.node_id, LogCredit(ask.request, credit))

    def forget(self, ask: _Ask, *, cancel: bool) -> None:
        """Stop waiting for the answer to a request; with `cancel`, make the node stop sending."""
        if ask.request is None:
            return
        del self._asks[ask.request]
        if cancel:
            self._send(ask.node_id, LogCredit(ask.request, 0, cancel=True))
        ask.request = None

    def discard(self, reader: LogReader) -> None:
        self._readers.pop(reader, None)


def _check(membership: Membership, wanted: LogsWanted) -> None:
    """Raise an error for a request for logs that do not exist."""
    name, last = membership.rdzv_id, membership.round
    if wanted.run and wanted.run != membership.run:
        raise RendezvousClosedError(
            f"run {wanted.run} of {name} has ended, and another has begun: run {membership.run}; "
            "read that one"
        )
    if wanted.follow and membership.ended is None:
        return
    if last is None:
        raise InvalidRequestError(
            f"{name} has had no round yet, so nothing was written; use --follow to wait for output"
        )
    if wanted.round is not None and wanted.round > last.number:
        raise InvalidRequestError(
            f"{name} has had no round {wanted.round}; its last is {last.number}"
        )
    of_last = wanted.round in (None, last.number)
    if of_last and wanted.rank is not None and wanted.rank >= last.world_size:
        raise InvalidRequestError(_no_rank(name, wanted.rank, last))


def _no_rank(name: str, rank: int, round_: Round) -> str:
    last = round_.world_size - 1
    ranks = f"its RANKs are 0 to {last}" if last else "its only RANK is 0"
    return f"{name} has no RANK {rank} in round {round_.number}; {ranks}"


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
        self._asks: dict[str, _Ask] = {}
        self._open = 0
        """The number of requests in progress."""
        self._came: deque[tuple[LogLines, _Ask, int]] = deque()
        self._notes: dict[str, str] = {}
        """The latest note that has not been passed on, by node; the empty name stands for the
        job."""
        self._looked_at: int | None = None
        """The last round checked for the wanted RANK; -1 if there was no round, None if not checked
        yet."""
        self._anything = False
        """Whether any wanted output has arrived, or a note on why a node sends none."""
        self._error: RendezvousError | None = None
        self._news = asyncio.Event()
        self._timer = Timer(logs.clock, self._tick)
        last = membership.round
        self._first = membership.next_round
        if wanted.round is not None:
            self._first = wanted.round
        elif last is not None:
            self._first = last.number
        candidates = _candidates(state, self._first, wanted.rank)
        self._credit = min(
            WINDOW_BYTES, max(BUFFER_BYTES // max(len(candidates), 1), WINDOW_BYTES_LEAST)
        )
        positions = by_node(wanted.positions)
        for node_id in {**dict.fromkeys(candidates), **positions}:
            round_, offsets = positions.get(node_id, (None, {}))
            self._ask(node_id, round_, offsets, expected=wanted.follow or node_id in state.away)
        self._say_if_absent(state)

    # ---------------------------------------------------------------- the caller's side

    async def next(self) -> LogLines | None:
        """Return the next lines or note, or None after the end.

        Raises:
            InvalidRequestError: no node has the wanted output.
            RendezvousConnectionError: this server no longer serves.

        """
        while True:
            self._news.clear()
            if self._error is not None:
                raise self._error
            if self._came:
                lines, ask, cost = self._came.popleft()
                self._give_back(ask, cost)
                return lines
            if self._notes:
                node_id = next(iter(self._notes))
                return LogLines(node_id, self._run, note=self._notes.pop(node_id))
            if self._open == 0 and self._no_more():
                self._check_anything()
                return None
            await self._news.wait()

    def _no_more(self) -> bool:
        """Return whether no more nodes can contribute output."""
        useless = bool(self._asks) and all(ask.failed for ask in self._asks.values())
        return self._over or not self._wanted.follow or useless

    def close(self) -> None:
        """Stop reading and notify the nodes."""
        self._timer.cancel()
        self._logs.discard(self)
        for ask in self._asks.values():
            self._logs.forget(ask, cancel=True)

    def _give_back(self, ask: _Ask, cost: int) -> None:
        """Renew a node's credit for consumed output once half of its credit has been used."""
        ask.taken += cost
        if ask.request is not None and ask.taken >= self._credit // 2:
            self._logs.grant(ask, ask.taken)
            ask.credit, ask.taken = ask.credit + ask.taken, 0
            self._expect(ask)

    def _check_anything(self) -> None:
        if not self._anything and not self._wanted.follow:
            who = f"RANK {self._wanted.rank}" if self._wanted.rank is not None else "a worker"
            raise InvalidRequestError(
                f"no node that is connected has had {who} in round {self._first} of "
                f"{self.rdzv_id}; on a node that has gone its files are in "
                f"{self.rdzv_id}-{self._run}/NODE_ID/round_{self._first} in its --log-dir"
            )

    # ---------------------------------------------------------------- called by WorkerLogs

    def take(self, ask: _Ask, piece: LogPiece) -> None:
        cost = len(piece.data) + PIECE_COST
        if cost > ask.credit:
            self._end(ask, "it is sending more than was requested; the rest is dropped")
            return
        ask.credit -= cost
        self._expect(ask)
        if piece.error:
            self._pass_on(ask, LogLines(ask.node_id, self._run, note=piece.error), cost)
        elif piece.data or not piece.last:
            self._keep(ask, piece, cost)
        if piece.last:
            ask.failed = bool(piece.error)
            self._logs.forget(ask, cancel=False)
            self._finish(ask)

    def _keep(self, ask: _Ask, piece: LogPiece, cost: int) -> None:
        if ask.round != piece.round:
            ask.round, ask.offsets = piece.round, {}
        if piece.data:
            ask.offsets[piece.local_rank, piece.stderr] = piece.offset + len(piece.data)
        lines = LogLines(
            node_id=ask.node_id,
            run=self._run,
            rank=piece.rank,
            local_rank=piece.local_rank,
            stderr=piece.stderr,
            round=piece.round,
            offset=piece.offset,
            data=piece.data,
        )
        self._pass_on(ask, lines, cost)

    def _pass_on(self, ask: _Ask, lines: LogLines, cost: int) -> None:
        self._anything = True
        self._came.append((lines, ask, cost))
        self._news.set()

    def note_state(self, state: State) -> None:
        """React to the job's new state: ask nodes that have joined a round, or end with the run."""
        if not self._wanted.follow or self._over:
            return
        membership = state.membership
        if membership.run != self._run or membership.ended is not None:
            self._over = True
            for ask in self._asks.values():
                if not ask.done and ask.request is None and not self._may_come_back():
                    self._end(ask, self._absent(ask))
            self._news.set()
        elif membership.round is not None and membership.round.number >= self._first:
            for node_id in _candidates(state, membership.round.number, self._wanted.rank):
                self._ask_in_round(node_id, membership.round.number)
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
            self._notes.pop("", None)
            return
        self._notes[""] = f"{text}; its output is shown once it exists"
        self._news.set()

    def _ask_in_round(self, node_id: str, number: int) -> None:
        """Ask a node that has joined a round, either for the first time or after leaving."""
        ask = self._asks.get(node_id)
        if ask is None:
            self._ask(node_id, self._first, {}, expected=True)
        elif ask.done and not ask.failed and (ask.round is None or number > ask.round):
            self._ask(node_id, number, {}, expected=True)

    def note_connected(self, node_id: str) -> None:
        ask = self._asks.get(node_id)
        if ask is not None and not ask.done and ask.request is None:
            self._open -= 1
            self._ask(node_id, ask.round, ask.offsets, expected=True)

    def note_gone(self, node_id: str) -> None:
        """Wait for a node whose stream has ended, or continue without it."""
        ask = self._asks.get(node_id)
        if ask is None or ask.request is None:
            return
        self._logs.forget(ask, cancel=False)
        if self._wanted.follow and not self._over:
            self._expect(ask)
        else:
            self._end(ask, f"its stream has ended before all was read; {self._where(ask)}")

    def fail(self, error: RendezvousError) -> None:
        """End the stream with an error for the caller."""
        self._error = error
        self._news.set()

    # ---------------------------------------------------------------- one node

    def _ask(
        self,
        node_id: str,
        round_: int | None,
        offsets: Mapping[tuple[int, bool], int],
        *,
        expected: bool,
    ) -> None:
        """Ask a node or, if it is away but expected back, wait for it to reconnect."""
        wanted, fresh = self._wanted, round_ is None
        ask = self._asks[node_id] = _Ask(
            node_id, credit=self._credit, round=round_, offsets=dict(offsets)
        )
        self._open += 1
        told = ReadLog(
            request=self._logs.next_number(),
            rdzv_id=self.rdzv_id,
            round=self._first if round_ is None else round_,
            rank=wanted.rank,
            stdout=wanted.stdout,
            stderr=wanted.stderr,
            follow=wanted.follow,
            tail_bytes=wanted.tail_bytes if fresh else 0,
            tail_lines=wanted.tail_lines if fresh else 0,
            credit=self._credit,
            positions=tuple(
                LogPosition("", round_ or 0, local_rank, stderr, offset)
                for (local_rank, stderr), offset in offsets.items()
            ),
            runs=self._runs,
        )
        if self._logs.ask(self, ask, told) or (expected and self._may_come_back()):
            ask.deadline_ms = self._logs.clock.now_ms() + ANSWER_MS
            self._timer.arm_by(ask.deadline_ms)
        else:
            self._end(ask, self._absent(ask))

    def _may_come_back(self) -> bool:
        """Return whether to wait for a node that is not connected."""
        return not self._over or self._logs.clock.now_ms() < self._logs.expects_until_ms

    def _expect(self, ask: _Ask) -> None:
        """Set the deadline for an answer, a node's return or, without `follow`, more output."""
        owes = ask.request is None or (not self._wanted.follow and ask.credit > PIECE_COST)
        ask.deadline_ms = self._logs.clock.now_ms() + ANSWER_MS if owes else None
        if ask.deadline_ms is not None:
            self._timer.arm_by(ask.deadline_ms)

    def _tick(self, _: int) -> None:
        now_ms = self._logs.clock.now_ms()
        for ask in tuple(self._asks.values()):
            if ask.done or ask.deadline_ms is None:
                continue
            if ask.deadline_ms > now_ms:
                self._timer.arm_by(ask.deadline_ms)
            elif ask.request is not None:
                seconds = ANSWER_MS / 1000
                self._end(
                    ask,
                    f"it has sent nothing for {seconds:g} s: its agent may be held up, or too old "
                    f"to read logs; {self._where(ask)}",
                )
            elif self._wanted.follow and not self._over:
                # Reading continues if the node returns.
                ask.deadline_ms = None
                self._note(ask, self._absent(ask))
            else:
                self._end(ask, self._absent(ask))

    def _end(self, ask: _Ask, note: str) -> None:
        ask.failed = True
        self._logs.forget(ask, cancel=True)
        self._note(ask, note)
        self._finish(ask)

    def _finish(self, ask: _Ask) -> None:
        if not ask.done:
            ask.done, ask.deadline_ms = True, None
            self._open -= 1
        self._news.set()

    def _note(self, ask: _Ask, text: str) -> None:
        self._anything = True
        self._notes[ask.node_id] = text
        self._news.set()

    def _absent(self, ask: _Ask) -> str:
        return f"its agent is not connected; {self._where(ask)}"

    def _where(self, ask: _Ask) -> str:
        number = self._first if ask.round is None else ask.round
        folder = f"{self.rdzv_id}-{self._run}/{ask.node_id}/round_{number}"
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


def by_node(
    positions: Iterable[LogPosition],
) -> dict[str, tuple[int | None, dict[tuple[int, bool], int]]]:
    """Group positions by node; if a node has several rounds, only the latest counts."""
    found: dict[str, tuple[int | None, dict[tuple[int, bool], int]]] = {}
    for at in positions:
        round_, offsets = found.get(at.node_id, (None, {}))
        if round_ is None or at.round > round_:
            round_, offsets = at.round, {}
        if at.round == round_:
            offsets[at.local_rank, at.stderr] = at.offset
        found[at.node_id] = round_, offsets
    return found
