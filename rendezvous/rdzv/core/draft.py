"""The mutable state changed by command rules and state rules during one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rdzv.core import model
from rdzv.core.events import Event, RunEnded
from rdzv.structs import replace


class Ignored(StrEnum):
    """The reason why a command had no effect.

    A command that arrives late, arrives twice, or comes from a replaced instance is not an error.
    """

    NO_OPEN_RUN = "no run is open"
    OTHER_RUN = "it names another run"
    OTHER_ROUND = "it names another round"
    ROUND_ENDED = "the round has ended for another cause"
    NOT_PRESENT = "the node is not in the job"
    OTHER_INSTANCE = "another instance has the node's place"
    NO_SEAT = "the node has no seat in the round"
    SEATED = "the node still has a seat"
    NOT_STORE_HOST = "the node does not host the store"
    NOT_SUBMITTED = "the run was not submitted"
    NOT_PLACED = "the node was not chosen"
    BARRED = "the node is barred from submitted jobs"
    KNOWN = "nothing new"


@dataclass(slots=True)
class Draft:
    """The state while a step is computing it. Changes are visible only within `step`."""

    state: model.State
    now_ms: int
    events: list[Event] = field(default_factory=list)

    @property
    def membership(self) -> model.Membership:
        return self.state.membership

    @property
    def open(self) -> bool:
        return self.state.run_is_open

    def put(
        self,
        *,
        of: str | None,
        seats: Mapping[str, model.Seat] | None = None,
        waiting: Mapping[str, model.WaitingNode] | None = None,
        stuck: Mapping[str, model.StuckWorkers] | None = None,
        away: Mapping[str, model.Away] | None = None,
    ) -> None:
        """Replace some of the mappings of present nodes.

        `of` is the only node whose place changes, or None if several places change and the nodes
        must be counted again.
        """
        before = self.state
        after = replace(
            before,
            seats=before.seats if seats is None else seats,
            waiting=before.waiting if waiting is None else waiting,
            stuck=before.stuck if stuck is None else stuck,
            away=before.away if away is None else away,
        )
        if of is None:
            hasty = sum(map(after.is_hasty, after.away))
            unready = sum(map(after.is_unready, after.away))
        else:
            hasty = before.hasty + after.is_hasty(of) - before.is_hasty(of)
            unready = before.unready + after.is_unready(of) - before.is_unready(of)
        self.state = replace(after, hasty=hasty, unready=unready)

    def store(self, membership: model.Membership) -> None:
        self.state = replace(self.state, membership=membership)

    def store_round(self, round_: model.Round) -> None:
        self.store(replace(self.membership, round=round_))

    def store_end(self, round_: model.Round, end: model.RoundEnd) -> None:
        self.store_round(replace(round_, end=end))

    def store_submission(self, submission: model.SubmittedRun) -> None:
        if submission != self.membership.submission:
            self.store(replace(self.membership, submission=submission))

    def close(
        self,
        result: model.Result,
        reason: str,
        *,
        retry_sensible: bool = False,
        failures: tuple[model.Failure, ...] = (),
        no_progress: bool = False,
    ) -> None:
        """Close the run, which then forms no more rounds and has no nodes."""
        ended = model.Ended(result, reason, self.now_ms, retry_sensible, failures, no_progress)
        self.state = model.State(replace(self.membership, ended=ended), self.state.tuning)
        self.events.append(RunEnded(self.membership.run, ended))
