"""Has the runner exchange copies of snapshots with a job's other nodes, where that is of use.

It is where a part of a sharded state may be on one node alone. Which node keeps what is decided by
the server; here are the credentials by which the nodes' carriers know each other: a random token,
new with each round, and a certificate where the connection to the server is encrypted as well, so
that the others are told of both by the server and nobody else.
"""

from __future__ import annotations

import logging
import secrets
import time

from rdzv.agent.job.context import JobContext
from rdzv.agent.job.copy_certificate import certified
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner_link import CopyCredentials, SnapshotsHeld
from rdzv.agent.system.side_thread import in_thread
from rdzv.structs import replace

log = logging.getLogger("rdzv.agent")

START_AGAIN_S = 60.0
"""How long a process that has ended is not replaced."""


class CopiesOfSnapshots:
    """The copies of one job on this node."""

    def __init__(self, launch: Launch, *, encrypted: bool) -> None:
        self._launch = launch
        self._encrypted = encrypted
        self._round: tuple[str, int] | None = None
        """Run and number of the round whose credentials the carrier has."""
        self._not_before = 0.0
        self._certified: CopyCredentials | None = None
        """The certificate, once it is made."""
        self._told: set[str] = set()

    def note(self, context: JobContext, event: SnapshotsHeld) -> None:
        """Start the carrier, or renew its token, if what is held now asks for it."""
        line, runner = context.decisions.state.assignment, context.runner
        if event.missing is not None and event.missing.reason not in self._told:
            self._told.add(event.missing.reason)
            log.warning(
                "%s: no copies of step %d are kept here: %s",
                self._launch.job.rdzv_id, event.missing.mark.step, event.missing.reason,
            )  # fmt: skip
        sharded = any(one.mark.shards > 1 and one.copy_of is None for one in event.snapshots)
        if not sharded or not self._launch.snapshot_copy_rate or not runner.carries_copies:
            return
        if line is None or line.group_world_size < 2:
            return
        is_new = self._round != (line.run, line.round)
        is_gone = event.carrier is None and time.monotonic() >= self._not_before
        if is_new or is_gone:
            self._round = line.run, line.round
            self._not_before = time.monotonic() + START_AGAIN_S
            context.tasks.start(self._carry(context), f"copies in {self._launch.job.rdzv_id}")

    async def _carry(self, context: JobContext) -> None:
        if self._certified is None:
            self._certified = CopyCredentials("")
            if self._encrypted:
                self._certified = await in_thread(certified)
        launch, token = self._launch, secrets.token_urlsafe(32)
        context.runner.carry_copies(
            launch.python,
            launch.environ,
            launch.identity,
            launch.snapshot_copy_rate,
            replace(self._certified, token=token),
        )
