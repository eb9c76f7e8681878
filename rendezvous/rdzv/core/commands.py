"""The commands of a rendezvous. They are named in the imperative and may be refused.

A command about a node's place names its incarnation, so a former instance of the node is ignored.
Repeating a command has no effect.
"""

from __future__ import annotations

from typing import Annotated

from rdzv.bounds import (
    NODES_PER_JOB,
    AnyUid,
    Cut,
    Elapsed,
    Else,
    First,
    Flat,
    Label,
    Sentence,
    Uid,
    Unsent,
    Within,
    sentence,
)
from rdzv.core import model
from rdzv.core.root_cause import earliest_failures
from rdzv.structs import struct

Wish = Annotated[Sentence, Else("an operator asked for it")]


Failures = Annotated[tuple[model.Failure, ...], Cut(earliest_failures)]
"""Failed workers as their node reports them: the server adds which node that is."""


@struct(frozen=True)
class OfNode:
    """A command from, or about, one instance of a node in the job.

    On the wire, the stream says which instance speaks; the node itself does not fill it in.
    """

    node_id: Annotated[str, Unsent]
    incarnation: Annotated[int, Unsent]


@struct(frozen=True)
class OfRound(OfNode):
    """A command of a node about a round."""

    run: Uid
    round: int


@struct(frozen=True)
class Join(OfNode):
    """Ask for a place in the next round.

    `left_round` confirms that the node's workers no longer take part in that round: each worker has
    exited, or is parked and listed in `kept`. `run` is empty for a fresh join. `fenced` means that
    the node was cut off and killed those workers itself, `fenced_age_ms` ago; none of them had
    failed. `moved` is the progress of its workers. `recovery` reports that round to a server that
    may not know it. `new_run` is the uid of a run that begins with this join; a job without an
    owner is then assigned to `owner`. `secret` is the hash of the node's job secret. `instance` is
    the instance behind the incarnation. `snapshots` lists all snapshots of the run's state that the
    node holds.
    """

    run: AnyUid
    settings: model.Settings
    offer: model.Offer
    left_round: int | None = None
    failures: Failures = ()
    refuse_reuse: bool = False
    new_run: Annotated[str, Unsent] = ""
    recovery: Annotated[model.RecoveryReport | None, Unsent] = None
    fenced: bool = False
    fenced_age_ms: Elapsed = 0
    moved: Annotated[model.Moved, Flat] = model.UNMOVED
    owner: Annotated[str, Unsent] = ""
    secret: str = ""
    instance: Annotated[model.Instance, Unsent] = model.UNKNOWN_INSTANCE
    kept: tuple[model.KeptWorker, ...] = ()
    snapshots: tuple[model.Snapshot, ...] = ()
    preparing: bool = False
    """Whether the node's workers would start cold now, and warm or hot soon."""
    standby: model.Standby = model.NO_STANDBY


@struct(frozen=True)
class Resume(OfNode):
    """Report, after a reconnect, that the node is running or stopping workers of `round`.

    `recovery` reports that round to a server that may not know it; `owner`, `secret` and `instance`
    are as in `Join`.
    """

    run: str
    round: int
    recovery: model.RecoveryReport | None = None
    owner: str = ""
    secret: str = ""
    instance: model.Instance = model.UNKNOWN_INSTANCE


@struct(frozen=True)
class Fail(OfRound):
    """Report failed workers of `round`; the node has already begun to stop its other workers."""

    failures: Failures


@struct(frozen=True)
class Succeed(OfRound):
    """Report that all workers of `round` on the node exited with code 0."""


@struct(frozen=True)
class Leave(OfNode):
    """Leave the job.

    The node keeps its seat until it leaves again with `left_round` set to the round.

    `run` is empty if the node leaves before it has learned which run it is in.
    """

    run: AnyUid
    cause: model.LeaveCause
    reason: Sentence
    left_round: int | None = None
    exited_zero: bool = False
    """All workers exited with code 0 after being notified that the node is about to leave."""


@struct(frozen=True)
class ReportStuck(OfRound):
    """Report workers of `round` that survive SIGKILL."""

    pids: Annotated[tuple[int, ...], First(64)]


@struct(frozen=True)
class ReportStoreHost(OfRound):
    """Report that the c10d store of `round` died or was not ready in time."""

    reason: Sentence


@struct(frozen=True)
class MarkAway(OfNode):
    """The node's stream has ended; the nodes core will give it up at `until_ms`."""

    until_ms: int
    firm: bool
    may_run: bool = True
    """Whether the node's workers may outlive its agent."""


@struct(frozen=True)
class MarkBack(OfNode):
    """The node is connected again."""


@struct(frozen=True)
class MarkLost(OfNode):
    """The nodes core has given up the node.

    `heard` means that the node reported having no workers.
    """

    reason: str
    heard: bool = False
    silent_ms: int = 0
    """The time for which the node was silent, if its stream was still open."""


@struct(frozen=True)
class MarkHeard:
    """A node given up as lost has reported back that no worker of this job remains on it."""

    node_id: str


@struct(frozen=True)
class Stop:
    """An operator ends this run; all its nodes stop their workers and leave."""

    run: Uid
    reason: Wish


@struct(frozen=True)
class Restart:
    """An operator ends this round so that another can form. No restart is spent."""

    run: Uid
    round: int
    reason: Wish


@struct(frozen=True)
class Scale:
    """An operator changes the bounds with which this run was launched.

    A round with more than `max_nodes` nodes ends at once, and the nodes with the highest
    GROUP_RANKs become spares. A round with fewer than `min_nodes` continues until something else
    ends it.
    """

    run: Uid
    min_nodes: Annotated[int, Within(1, NODES_PER_JOB)]
    max_nodes: Annotated[int, Within(1, NODES_PER_JOB)]
    reason: Wish


@struct(frozen=True)
class Submit:
    """Begin a run whose nodes are chosen by the server. `run` is its uid."""

    run: Uid
    settings: model.Settings
    spec: model.JobSpec
    submitted_by: Annotated[Label, Cut(sentence), Else("somebody")]


@struct(frozen=True)
class Place:
    """Choose these nodes for a submitted run, which each of them then joins."""

    run: str
    node_ids: tuple[str, ...]


@struct(frozen=True)
class Withdraw:
    """Withdraw these nodes from the run.

    A node with a seat keeps both its seat and its placement.
    """

    run: str
    node_ids: tuple[str, ...]
    reason: str


@struct(frozen=True)
class Bar:
    """List all nodes that submitted jobs must release, each with the reason.

    A submitted run releases such a node at once or, if the node holds a seat, when it gives up that
    seat.
    """

    barred: tuple[tuple[str, str], ...]


@struct(frozen=True)
class Decline:
    """A chosen node cannot run the job.

    It is not chosen again in this run, unless the obstacle is `passing`.
    """

    node_id: Annotated[str, Unsent]
    run: Uid
    reason: Sentence
    passing: bool = False


@struct(frozen=True)
class GiveUp:
    """Close a submitted run that no node can run."""

    run: str
    reason: str


@struct(frozen=True)
class Tick:
    """Advance the time. A tick before the last transition's `wake_at_ms` has no effect."""


Command = (
    Join
    | Resume
    | Fail
    | Succeed
    | Leave
    | ReportStuck
    | ReportStoreHost
    | MarkAway
    | MarkBack
    | MarkLost
    | MarkHeard
    | Stop
    | Restart
    | Scale
    | Submit
    | Place
    | Withdraw
    | Bar
    | Decline
    | GiveUp
    | Tick
)
