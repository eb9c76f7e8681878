"""Lets the runner exchange copies of snapshots with a job's other nodes, if these are useful.

Copies are useful if the state is sharded, because only one node may then hold a given part. The
server decides which node keeps which copies. This module gives the node's carrier its credentials:
a new random token in each round, and a certificate if the connection to the server is encrypted.
The other nodes receive both from the server.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rdzv.agent.core.events import SnapshotsChanged
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner_link import CopyCredentials
from rdzv.agent.system.side_thread import in_thread
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.agent.job.job_driver import JobDriver

log = logging.getLogger("rdzv.agent")
START_AGAIN_S = 60.0
"""How long after its start a carrier that has ended may be replaced."""


class CopiesOfSnapshots:
    """Manages the copies of one job's snapshots on this node."""

    def __init__(self, launch: Launch, *, encrypted: bool) -> None:
        self._launch = launch
        self._encrypted = encrypted
        self._round: tuple[str, int] | None = None
        """The run and round for which the carrier was last given a token."""
        self._not_before = 0.0
        """The earliest time at which a carrier that has ended may be replaced."""
        self._certified: CopyCredentials | None = None
        """The credentials without a token; None until they are first needed."""
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
            self._certified = CopyCredentials("")
            if self._encrypted:
                self._certified = await in_thread(certified)
        launch, token = self._launch, secrets.token_urlsafe(32)
        rate = str(launch.snapshot_copy_rate)
        argv = (launch.python, "-m", "rdzv.worker.copy_snapshots", "--rate", rate)
        credentials = replace(self._certified, token=token)
        job.runner.carry_copies(argv, launch.environ, launch.chdir, launch.identity, credentials)


def certified() -> CopyCredentials:
    """Return new credentials without a token. The first call is slow because it loads a library."""
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
    return CopyCredentials("", hashlib.sha256(public).hexdigest(), pem.decode())
