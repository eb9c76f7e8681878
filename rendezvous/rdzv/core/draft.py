"""The mutable state changed by command rules and state rules during one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rdzv.core.events import Event
from rdzv.core.model import Away, Membership, Round, Seat, State, Stuck, Submission, Waiting
from rdzv.structs import replace


@dataclass(slots=True)
class Draft:
    """The state while a step is computing it. Changes are visible only within `step`."""

    state: State
    now_ms: int
    events: list[Event] = field(default_factory=list)

    @property
    def membership(self) -> Membership:
        return self.state.membership

    @property
    def open(self) -> bool:
        """Whether the job has a run that has not ended."""
        return self.state.run_is_open

    def put(
        self,
        *,
        of: str | None,
        seats: Mapping[str, Seat] | None = None,
        waiting: Mapping[str, Waiting] | None = None,
        stuck: Mapping[str, Stuck] | None = None,
        away: Mapping[str, Away] | None = None,
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

    def store(self, membership: Membership) -> None:
        self.state = replace(self.state, membership=membership)

    def store_round(self, round_: Round) -> None:
        self.store(replace(self.membership, round=round_))

    def store_submission(self, submission: Submission) -> None:
        if submission != self.membership.submission:
            self.store(replace(self.membership, submission=submission))
