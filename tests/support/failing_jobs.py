"""Simulates a job whose nodes and workers fail, step by step, and knows what each policy costs.

It shares nothing with `rdzv.view.advice`: it counts steps, while the advice reads phases. The same
failures under another policy give the true answer to "what would it have cost?".
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from rdzv.core import events
from rdzv.core.model import Cause
from rdzv.view import history
from rdzv.view.history import Kept

HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Failure:
    """A worker fails or, if `away_ms` is not 0, a node is lost for so long."""

    at_ms: int
    victim: str | int
    """The node or, among those of the round, its number. A named node fails only in a round."""
    away_ms: int = 0


@dataclass(frozen=True)
class Policy:
    """How a job answers failures."""

    spares: int
    every: int
    """The number of steps between snapshots."""


@dataclass(frozen=True)
class World:
    """All that is not a choice."""

    least: int
    most: int
    span_ms: int
    step_ms: int
    snapshot_ms: int
    failures: tuple[Failure, ...]
    silent_ms: int = 15_000
    stop_ms: int = 4_000
    form_ms: int = 2_000
    load_ms: int = 60_000
    report_ms: int = 1_000


def a_world(seed: int, failures: int, least: int | None = None, bad: int = 0) -> World:
    """Make a world with about so many failures, of which `bad` are those of the node n1."""
    random = Random(f"failing jobs {seed}")
    most = random.choice((4, 8, 16))
    span_ms = random.randint(10, 30) * 24 * HOUR_MS
    share = random.uniform(0.2, 0.6)
    away_ms = random.uniform(0.2, 1.5) * HOUR_MS
    found = [
        Failure(
            random.randrange(span_ms),
            random.randrange(most),
            round(random.expovariate(1 / away_ms)) + 1 if random.random() < share else 0,
        )
        for _ in range(failures)
    ]
    found += [Failure(random.randrange(span_ms), "n1") for _ in range(bad)]
    return World(
        least=most if least is None else least,
        most=most,
        span_ms=span_ms,
        step_ms=random.randint(500, 5_000),
        snapshot_ms=random.randint(500, 8_000),
        load_ms=random.randint(5_000, 300_000),
        failures=tuple(sorted(found, key=lambda one: one.at_ms)),
    )


def a_policy(seed: int, world: World) -> Policy:
    """Choose spares, and snapshots that are far more frequent than failures."""
    random = Random(f"policy {seed}")
    between_ms = world.span_ms / len(world.failures)
    every_ms = between_ms * random.uniform(0.05, 0.25)
    return Policy(random.randint(0, 2), max(round(every_ms / world.step_ms), 2))


@dataclass
class Life:
    """One job's life under a policy: what happens, and what is left of the held time."""

    world: World
    policy: Policy
    past: list[tuple[int, Kept]] = field(default_factory=list)
    """Its events, with their times."""
    victims: dict[int, str] = field(default_factory=dict)
    """The node that each failure has ended a round of, by the number of the failure."""
    held_ms: int = 0
    work_ms: int = 0
    """The time of the steps that count, multiplied by the nodes that made them."""
    _now_ms: int = 0
    _present: list[str] = field(default_factory=list)
    _seated: list[str] = field(default_factory=list)
    _coming: list[tuple[int, int, str]] = field(default_factory=list)
    """A heap of what comes: the time, and the number of a failure, or -1 and a node's return."""
    _round: int = 0
    _furthest: int = 0
    _saved: int = 0

    @property
    def lost_ms(self) -> int:
        return self.held_ms - self.work_ms

    def live(self) -> Life:
        for number, failure in enumerate(self.world.failures):
            self._coming.append((failure.at_ms, number, ""))
        heapq.heapify(self._coming)
        self._say(events.RunBegan("r", 1, "the first of this job"))
        for number in range(self.world.most + self.policy.spares):
            self._join(f"n{number}")
        while self._now_ms < self.world.span_ms and self._gather():
            self._train()
        self._pass_time(self.world.span_ms)
        return self

    def _say(self, event: Kept, at_ms: int | None = None) -> None:
        self.past.append((self._now_ms if at_ms is None else at_ms, event))

    def _join(self, node: str) -> None:
        self._present.append(node)
        self._say(events.NodeJoined(node, 1, "10.0.0.1", 1))

    def _pass_time(self, until_ms: int) -> None:
        until_ms = min(until_ms, self.world.span_ms)
        self.held_ms += len(self._present) * max(until_ms - self._now_ms, 0)
        self._now_ms = max(until_ms, self._now_ms)

    def _next(self, until_ms: int) -> tuple[int, str] | None:
        """Go on to what comes next or, if that is later, until then."""
        if not self._coming or self._coming[0][0] > min(until_ms, self.world.span_ms):
            self._pass_time(until_ms)
            return None
        at_ms, number, node = heapq.heappop(self._coming)
        self._pass_time(at_ms)
        return number, node

    def _wait(self, until_ms: int, enough: int = 10**9) -> None:
        """Let nodes come and go until then, or until there are enough of them."""
        while len(self._present) < enough and (came := self._next(until_ms)) is not None:
            number, node = came
            if number < 0:
                self._join(node)
                continue
            failure = self.world.failures[number]
            if failure.away_ms and isinstance(failure.victim, int) and self._present:
                self._lose(self._present[failure.victim % len(self._present)], failure, 0)

    def _lose(self, node: str, failure: Failure, silent_ms: int) -> None:
        self._present.remove(node)
        heapq.heappush(self._coming, (failure.at_ms + failure.away_ms + silent_ms, -1, node))
        self._say(events.NodeLost(node, "lease expired", silent_ms=silent_ms))

    def _gather(self) -> bool:
        """Wait for enough nodes, and form a round; return whether there is one before the end."""
        while True:
            self._wait(self.world.span_ms, self.world.least)
            if len(self._present) < self.world.least:
                return False
            enough_ms = self._now_ms
            self._wait(enough_ms + self.world.form_ms)
            if len(self._present) >= self.world.least:
                break
        if self._now_ms >= self.world.span_ms:
            return False
        stay = [node for node in self._seated if node in self._present]
        others = [node for node in self._present if node not in stay]
        self._seated = (stay + others)[: self.world.most]
        places = tuple(history.Place(node, rank, 1) for rank, node in enumerate(self._seated))
        number = len(self._seated)
        enough_ms = self._now_ms - enough_ms
        self._say(
            history.RoundCompleted(self._round, number, number, places[:8], "h", 1, enough_ms)
        )
        return True

    def _steps(self, elapsed_ms: int) -> tuple[int, int]:
        """Return the steps made since the start of training, and how many of them are saved."""
        every, step_ms = self.policy.every, self.world.step_ms
        whole, rest_ms = divmod(max(elapsed_ms, 0), every * step_ms + self.world.snapshot_ms)
        return whole * every + min(rest_ms // step_ms, every), whole * every

    def _made_ms(self, steps: int) -> int:
        """Return how long after the start of training a step is made."""
        snapshots = max(steps - 1, 0) // self.policy.every
        return steps * self.world.step_ms + snapshots * self.world.snapshot_ms

    def _train(self) -> None:
        """Train until a failure, or the end, and stop."""
        world, before, number = self.world, self._furthest, self._round
        began_ms = self._now_ms + world.load_ms
        first, again = self._saved + 1, before - self._saved
        marks: list[tuple[int, Kept]] = [
            (
                began_ms + self._made_ms(1),
                events.FirstStepMade(number, self._seated[0], 0, first, 0),
            )
        ]
        if again > 0:
            back_ms = began_ms + self._made_ms(again)
            marks.append((back_ms, events.LostStepsRedone(number, before, 0)))
        failed = self._until_failure(marks)
        made, saved = self._steps(self._now_ms - began_ms)
        step = self._saved + made
        self._furthest, self._saved = max(before, step), self._saved + saved
        self.work_ms += (self._furthest - before) * world.step_ms * len(self._seated)
        if failed is not None:
            self._stop(*failed, step if made else None, self._now_ms - began_ms)

    def _until_failure(self, marks: Sequence[tuple[int, Kept]]) -> tuple[int, str] | None:
        left = list(marks)
        while True:
            came = self._next(self.world.span_ms)
            while left and left[0][0] <= self._now_ms:
                at_ms, event = left.pop(0)
                self._say(event, at_ms)
            if came is None:
                return None
            failure = self.world.failures[came[0]] if came[0] >= 0 else None
            if failure is None:
                self._join(came[1])
                if len(self._seated) < self.world.most:
                    return -1, came[1]
            elif isinstance(failure.victim, int):
                return came[0], self._seated[failure.victim % len(self._seated)]
            elif failure.victim in self._seated:
                return came[0], failure.victim

    def _stop(self, number: int, node: str, step: int | None, elapsed_ms: int) -> None:
        """End the round, because of a failure or of a node that has joined."""
        broke_ms, world = self._now_ms, self.world
        if number < 0:
            cause, noticed_ms, node = Cause.NODES_JOINED, 0, ""
        else:
            self.victims[number] = node
            failure = world.failures[number]
            cause = Cause.NODE_LOST if failure.away_ms else Cause.WORKER_FAILURE
            noticed_ms = world.silent_ms if failure.away_ms else world.report_ms
            if failure.away_ms:
                # The node is held until its loss is noticed.
                self._pass_time(broke_ms + noticed_ms)
                if self._now_ms >= world.span_ms:
                    return
                self._lose(node, failure, noticed_ms)
            else:
                self._pass_time(broke_ms + noticed_ms)
                self._say(history.WorkerFailed(self._round, node, 0, 0, 9, 1, None, "", noticed_ms))
        if self._now_ms >= world.span_ms:
            return
        self._say(history.RoundEnded(self._round, cause, "why", True, 0, node))
        if step is not None:
            ago_ms = self._now_ms - broke_ms
            self._say(events.LastStepMade(self._round, step, ago_ms))
        if times := self._steps(elapsed_ms)[1] // self.policy.every:
            saved = events.SnapshotsSaved(self._round, times, times * world.snapshot_ms)
            self._say(saved)
        self._wait(self._now_ms + world.stop_ms)
        if self._now_ms < world.span_ms:
            self._say(
                history.RoundSettled(self._round, cause, "why", 0, 3, None, node, step),
            )
        self._round += 1


def lived(world: World, policy: Policy) -> Life:
    return Life(world, policy).live()


def without(world: World, life: Life, node: str) -> World:
    """Return the same world without the failures that were this node's in one life."""
    failures = tuple(
        one for number, one in enumerate(world.failures) if life.victims.get(number) != node
    )
    return replace(world, failures=failures)
