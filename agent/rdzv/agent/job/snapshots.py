"""Has a job's runner write this node's snapshots to disk, and exchange copies with other nodes.

Each node has only its own parts, so all nodes of a round write the same marks: the first that
became whole in each period, by the server's clock. If all nodes hold the same state, only the first
node writes it; at the end, and before leaving, every node does, because the others may be gone.

Copies serve sharded state, of which only one node may hold a part. The server decides who keeps
which. Here the node's carrier gets its credentials: a new token in each round, and a certificate if
the connection to the server is encrypted. The other nodes receive both from the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rdzv.agent.core.events import SnapshotsChanged, SnapshotsWritten
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner.requests import CarryCopies, StateMark, WriteSnapshots
from rdzv.agent.runner_link.runner_link import RunnerLink
from rdzv.agent.system.side_thread import in_thread
from rdzv.core.model import Assignment, SnapshotMark
from rdzv.messages import SnapshotsHeld
from rdzv.structs import as_dict

if TYPE_CHECKING:
    from rdzv.agent.job.job_driver import JobDriver

log = logging.getLogger("rdzv.agent")

LAST_TIMEOUT_S = 600.0
"""How long the end of a job waits for the last snapshot to be written."""
EVERY_LEAST_S, EVERY_PER_NODE_S = 0.1, 0.001
"""The least time between two reports, and per node of a round, all of which save at once."""
START_AGAIN_S = 60.0
"""How long after its start a carrier that has ended may be replaced."""


class SnapshotsOnDisk:
    """Writes one job's snapshots on this node to disk."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._files = launch.snapshot_files
        self._period: int | None = None
        """The period in which the last mark became whole."""
        self._writing: SnapshotMark | None = None
        self._written: SnapshotMark | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def announced(
        self, runner: RunnerLink, mark: SnapshotMark, whole_ms: int, assignment: Assignment | None
    ) -> None:
        """Write a mark that has become whole, if it is the first one in its period."""
        if self._files is None or not self._files.every_s or not whole_ms or assignment is None:
            return
        period = int(whole_ms / (1000 * self._files.every_s))
        is_first = self._period is not None and period > self._period
        self._period = period
        if is_first and (mark.shards > 1 or assignment.group_rank == 0):
            self.write(runner, mark, assignment.run)

    def write(self, runner: RunnerLink, mark: SnapshotMark | None, run: str) -> None:
        """Start writing this node's part of a mark, unless another is being written, or it was."""
        launch, files = self._launch, self._files
        if files is None or mark is None or mark == self._written or self._writing is not None:
            return
        self._writing = mark
        self._idle.clear()
        argv = (launch.python, "-m", "rdzv.worker.write_snapshots", str(files.folder), "--run", run)
        keep = ("--keep", str(files.keep))
        cwd = None if launch.chdir is None else str(launch.chdir)
        state = StateMark(**as_dict(mark))
        runner.ask(WriteSnapshots(state, (*argv, *keep), launch.environ, cwd, launch.identity))

    def note(self, event: SnapshotsWritten) -> None:
        self._writing = None
        self._idle.set()
        rdzv_id = self._launch.job.rdzv_id
        folder = None if self._files is None else self._files.folder
        if event.reason:
            text = "%s: the snapshot of step %d was not written to %s: %s"
            log.warning(text, rdzv_id, event.mark.step, folder, event.reason)
        else:
            self._written = event.mark
            log.info("%s: wrote the snapshot of step %d to %s", rdzv_id, event.mark.step, folder)

    async def write_last(self, runner: RunnerLink, mark: SnapshotMark | None, run: str) -> None:
        try:
            async with asyncio.timeout(LAST_TIMEOUT_S):
                await self._idle.wait()
                self.write(runner, mark, run)
                await self._idle.wait()
        except TimeoutError:
            text = "%s: gave up writing the last snapshot to disk after %g s"
            log.error(text, self._launch.job.rdzv_id, LAST_TIMEOUT_S)

    def note_runner_gone(self) -> None:
        self._writing = None
        self._idle.set()


class CopiesOfSnapshots:
    """Manages the copies of one job's snapshots on this node."""

    def __init__(self, launch: Launch, *, encrypted: bool) -> None:
        self._launch = launch
        self._encrypted = encrypted
        self._round: tuple[str, int] | None = None
        """The run and round for which the carrier was last given a token."""
        self._not_before = 0.0
        """The earliest time at which a carrier that has ended may be replaced."""
        self._certified: tuple[str, str] | None = None
        """The fingerprint of the carrier's certificate, and the certificate with its key, which are
        empty if it does not encrypt; None until they are first needed.
        """
        self._logged: set[str] = set()
        """The reasons for missing copies that have already been logged."""

    def note(self, job: JobDriver, event: SnapshotsChanged) -> None:
        """Start the carrier, or renew its token, if the currently held snapshots require it."""
        assignment = job.decisions.state.assignment
        if event.missing is not None and event.missing.reason not in self._logged:
            self._logged.add(event.missing.reason)
            log.warning(
                "%s: this node could not get copies of step %d: %s",
                self._launch.job.rdzv_id, event.missing.mark.step, event.missing.reason,
            )  # fmt: skip
        sharded = any(one.mark.shards > 1 and one.copy_of is None for one in event.snapshots)
        if not sharded or not self._launch.snapshot_copy_rate:
            return
        if assignment is None or assignment.group_world_size < 2:
            return
        is_new = self._round != (assignment.run, assignment.round)
        is_gone = event.carrier is None and time.monotonic() >= self._not_before
        if is_new or is_gone:
            self._round = assignment.run, assignment.round
            self._not_before = time.monotonic() + START_AGAIN_S
            job.tasks.start(self._carry(job), f"copies in {self._launch.job.rdzv_id}")

    async def _carry(self, job: JobDriver) -> None:
        if self._certified is None:
            self._certified = ("", "")
            if self._encrypted:
                self._certified = await in_thread(certified)
        launch, token = self._launch, secrets.token_urlsafe(32)
        rate = str(launch.snapshot_copy_rate)
        argv = (launch.python, "-m", "rdzv.worker.copy_snapshots", "--rate", rate)
        cwd = None if launch.chdir is None else str(launch.chdir)
        job.runner.ask(
            CarryCopies(argv, launch.environ, cwd, launch.identity, token, *self._certified)
        )


def certified() -> tuple[str, str]:
    """Return a new certificate's fingerprint, and the certificate with its private key, as PEM.

    The first call is slow because it loads a library.
    """
    from cryptography import x509  # The import takes 36 ms and 10 MiB.
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rdzv snapshots")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Used only while its process is alive; the dates allow for wrong clocks on other nodes.
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.DER)
    pem = private + certificate.public_bytes(serialization.Encoding.PEM)
    return hashlib.sha256(public).hexdigest(), pem.decode()


class SnapshotReports:
    """Sends reports at a limited rate. Each is complete, so only the latest one matters."""

    def __init__(self, send: Callable[[SnapshotsHeld], None]) -> None:
        self._send = send
        self._next: SnapshotsHeld | None = None
        """The report that is waiting to be sent, if any."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs until the next report may be sent."""

    def report(self, say: SnapshotsHeld, nodes: int) -> None:
        self._next = say
        if self._timer is None:
            self._send_next(max(EVERY_LEAST_S, nodes * EVERY_PER_NODE_S))

    def _send_next(self, every_s: float) -> None:
        self._timer = None
        if self._next is not None:
            say, self._next = self._next, None
            self._send(say)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(every_s, self._send_next, every_s)

    def close(self) -> None:
        self._next = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
