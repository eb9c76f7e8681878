"""Checks and restores rdzvd's store without serving, for `--check` and `--restore`."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

from rdzv.core.invariants import violations
from rdzv.core.life import restoring, runs
from rdzv.core.model import Membership, Tuning
from rdzv.core.words import size_text
from rdzv.errors import InvalidRequestError, RendezvousStateError, StoreRefusedError
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.stores import backup
from rdzv.stores.base import Store
from rdzv.stores.election import Election
from rdzv.stores.election_session import FencingToken
from rdzv.stores.etcd import EtcdStore
from rdzv.stores.etcd_client import EtcdClient
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.stores.sqlite import SqliteStore, Survey
from rdzv.stores.sqlite_file import SCHEMA_VERSION, has_data, try_room
from rdzv.structs import struct

ELECTION_TIMEOUT_S = 15.0
"""How long a restore waits to be elected: longer than a dead leader's default lease."""


@struct(frozen=True)
class CheckResult:
    """The result of a check: human-readable lines about the contents, and the problems found."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]


async def check(config: RdzvdSettings) -> CheckResult:
    lines = [f"configuration: in order; listen on {config.listen}, store {config.store}"]
    problems = list(_without_room(config.data_folder)) if config.store == "sqlite" else []
    if config.store == "memory":
        lines.append("store: in memory, empty at every start")
    elif config.store == "sqlite" and not _has_data(config.data_folder):
        lines.append(f"store: {config.data_folder} holds no data yet; rdzvd will create it")
    else:
        try:
            await _check_data(config, lines, problems)
        except StoreRefusedError as error:
            # SQLite writes files even for reading; on a full disk it reports only "disk I/O error".
            if not problems:
                raise
            lines.append(f"store: {config.data_folder} cannot be checked: {error}")
    lines.append(f"{len(problems)} problem(s) found" if problems else "all is in order")
    return CheckResult(tuple(lines), tuple(problems))


async def _check_data(config: RdzvdSettings, lines: list[str], problems: list[str]) -> None:
    async with _opened(config, writes=False) as store:
        if isinstance(store, SqliteStore):
            survey = await store.survey()
            lines += _described(survey)
            problems += [f"{survey.path} {what}" for what in survey.problems]
        else:
            lines.append(f"store: {store.place}")
        await _check_jobs(store, config, lines, problems)
        if documents := await store.list_documents():
            lines.append(f"documents: {', '.join(documents)}")


def _has_data(directory: Path) -> bool:
    try:
        return has_data(directory / "rdzv.db")
    except OSError as error:
        raise InvalidRequestError(
            f"data directory {directory} cannot be read: {error.strerror or error}; look at it as "
            "the user that runs rdzvd"
        ) from error


def _described(survey: Survey) -> Iterator[str]:
    yield f"store: {survey.path}, schema version {SCHEMA_VERSION}, {size_text(survey.size_bytes)}"
    if survey.used_by:
        yield f"in use by: {survey.used_by}; the check has read it at the same time"
    yield f"leadership: {survey.leadership}"
    yield f"events: {survey.events}"


def _without_room(directory: Path) -> Iterator[str]:
    try:
        try_room(directory)
    except (FileNotFoundError, PermissionError):
        # If the directory does not exist yet or another account runs the check, this proves
        # nothing.
        return
    except OSError as error:
        yield f"{directory} cannot be written to: {error.strerror or error}; nothing can be stored"


async def _check_jobs(
    store: Store, config: RdzvdSettings, lines: list[str], problems: list[str]
) -> None:
    jobs = open_runs = 0
    async with aclosing(store.pages()) as pages:
        async for page in pages:
            jobs += len(page)
            for rdzv_id, stored in page:
                if isinstance(stored, RendezvousStateError):
                    problems.append(str(stored))
                    continue
                membership = stored.membership
                open_runs += bool(membership.run) and membership.ended is None
                flaws = _flaws(rdzv_id, membership, config)
                problems += [f"job {rdzv_id}: {what}" for what in flaws]
    lines.append(f"jobs: {jobs}, of them {open_runs} with an open run")


def _flaws(rdzv_id: str, membership: Membership, config: RdzvdSettings) -> Iterator[str]:
    if membership.rdzv_id != rdzv_id:
        yield f"it is stored under this name, but is named {membership.rdzv_id}"
    now_ms = round(time.time() * 1000)
    restored = restoring.restore(membership, Tuning(config.lease.takeover_grace_ms), now_ms)
    yield from violations(runs.vacant(rdzv_id, Tuning(config.lease.takeover_grace_ms)), restored)
    if membership.round is not None and membership.round.number >= membership.next_round:
        yield f"round {membership.round.number} is not below the next one, {membership.next_round}"


async def restore(config: RdzvdSettings, file: Path) -> str:
    """Fill an empty store from a backup, and return a sentence that describes what was restored.

    The whole file is verified before anything is written.
    """
    if config.store == "memory":
        raise InvalidRequestError(
            "the memory store forgets what is restored into it at once; restore into another"
        )
    try:
        with file.open("rb") as opened:
            # Verify first, because opening the store would create it.
            backup.verify(opened, str(file))
            opened.seek(0)
            async with _opened(config, writes=True) as store:
                done = await backup.restore(store, opened, str(file))
                place = store.place
    except OSError as error:
        raise InvalidRequestError(
            f"{file} cannot be read: {error.strerror or error}; give a file that `rdzvctl backup` "
            "has written"
        ) from error
    count = done.trailer
    more = f", with {count.documents} document(s)" if count.documents else ""
    return (
        f"restored {count.jobs} job(s) and {count.events} event(s) into {place}; they were saved "
        f"from {done.header.source} at {backup.made_at(done)}{more}"
    )


@asynccontextmanager
async def _opened(config: RdzvdSettings, *, writes: bool) -> AsyncIterator[Store]:
    """Open the store; if it is shared, writing to it takes leading its servers."""
    async with AsyncExitStack() as stack:
        store: Store
        if (etcd := config.etcd.config()) is not None:
            client = await stack.enter_async_context(EtcdClient.connected(etcd))
            fence = None
            if writes:
                # The name has no address, so that no client connects to this short-lived leader.
                name = f"rdzvd --restore (pid {os.getpid()} on {socket.gethostname()})"
                election = await stack.enter_async_context(Election.running(client, name))
                fence = await _elected(election, etcd)
            store = EtcdStore(client, fence)
        else:
            open_file = SqliteStore.open if writes else SqliteStore.look
            store = await open_file(config.data_folder)
        stack.push_async_callback(store.close)
        yield store


async def _elected(election: Election, etcd: EtcdConfig) -> FencingToken:
    """Wait until elected, long enough for a dead leader's lease to expire; return the fence."""
    try:
        async with asyncio.timeout(ELECTION_TIMEOUT_S):
            return await election.campaign()
    except TimeoutError:
        raise InvalidRequestError(_why_not_elected(election, etcd)) from None


def _why_not_elected(election: Election, etcd: EtcdConfig) -> str:
    if leader := election.leader:
        return (
            f"{etcd.place} is served by {leader.address}; stop every rdzvd that shares it, "
            "restore, and start them again"
        )
    return (
        f"{etcd.place} did not answer within {ELECTION_TIMEOUT_S:g} s; see that a majority of its "
        "members runs, and that the options --etcd-* fit"
    )
