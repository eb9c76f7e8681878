"""rdzv-agent as a daemon: a stream to the server, and the jobs that are placed through it.

It keeps running without jobs and without a server. SIGTERM notifies the workers, leaves every job
in an orderly way, and ends the agent. SIGUSR2 also ends it, but leaves its jobs to the next agent;
SIGTERM does the same if systemd is about to restart the agent. SIGHUP reloads the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.agent.app.agent_config import check_own, read_config
from rdzv.agent.app.agent_settings import AgentSettings
from rdzv.agent.handover.runner_adoption import AdoptedRunner, RunnerAdoption, RunnerRecords
from rdzv.agent.inventory.health import NodeHealth
from rdzv.agent.inventory.preemption import reporting_preemptions
from rdzv.agent.inventory.resources import NONE, describe, find_resources
from rdzv.agent.node import node
from rdzv.agent.node.placements import Placements
from rdzv.agent.node.submitted_launch import Surroundings
from rdzv.agent.output.run_folders import RunFolders
from rdzv.agent.runner.processes import become_subreaper
from rdzv.agent.server_link.link import ServerLink
from rdzv.agent.system.accounts import identity_of_owner, open_untrusted
from rdzv.agent.system.folder_trees import remove_tree
from rdzv.agent.system.side_thread import in_thread, in_time
from rdzv.agent.system.temporary_folders import PROGRESS
from rdzv.core.fleet.node_resources import NodeResources
from rdzv.errors import InvalidRequestError
from rdzv.runtime import systemd
from rdzv.runtime.tasks import single_error
from rdzv.settings.toml_files import ConfigurationError, Loaded, compare
from rdzv.structs import replace

if TYPE_CHECKING:
    from rdzv.agent.node.agent_metrics import AgentMetrics

log = logging.getLogger("rdzv.agent")

RESTARTS = ("restart", "try-restart", "reload-or-restart")
"""The systemd jobs that stop this agent and then start another."""

SWEEP_EVERY_S = 3_600.0
"""The interval at which old logs are removed, which is short compared with their retention time."""

READ_CONFIG_WITHIN_S = 30.0
"""How long it may take to read the configuration and check the files named in it."""

END_MS = 60_000
"""How long after the drain deadline the last of a job's processes may take to end."""

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HAND_OVER_SIGNAL = signal.SIGUSR2


async def serve(
    path: Path, loaded: Loaded[AgentSettings], set_log_level: Callable[[str], None]
) -> None:
    """Run submitted jobs until a signal ends the agent.

    On return, all their processes are gone, unless the jobs were left to the next agent.

    The configuration is reloaded from `path`.
    """
    settings = loaded.settings
    with single_error(), systemd.watched(), _own_directories(settings):
        # This comes first because the previous agent's runners wait only for the length of a lease.
        adoption = RunnerAdoption(settings.runtime_dir, settings.node_id)
        adopted = await adoption.adopt_runners()
        await in_thread(_remove_leftovers, settings.runtime_dir, adopted)
        resources = await _resources(settings, has_workers=bool(adopted))
        daemon = Daemon(path, loaded, set_log_level, resources, adoption)
        log.info("node %s is ready to run submitted jobs: %s", settings.node_id, daemon.describe())
        async with reporting_preemptions(settings.preemption, daemon.link.drain_node):
            await daemon.placements.adopt(adopted)
            await daemon.run(has_workers=bool(adopted))


async def _resources(settings: AgentSettings, *, has_workers: bool) -> NodeResources:
    """Find this machine's resources; if that fails while it `has_workers`, those without GPUs."""

    def find(gpus: str) -> NodeResources:
        return find_resources(
            gpus,
            labels=settings.labels,
            capacity=settings.capacity,
            topology=settings.topology or "",
        )

    try:
        return await in_thread(find, settings.gpus)
    except InvalidRequestError as error:
        if not has_workers:
            raise
        log.error(
            "%s; new jobs get no GPUs on this node until the agent is restarted; the previous "
            "agent's workers continue", error)  # fmt: skip
        return await in_thread(find, NONE)


class Daemon:
    """An rdzv-agent that takes submitted jobs."""

    def __init__(
        self,
        path: Path,
        loaded: Loaded[AgentSettings],
        set_log_level: Callable[[str], None],
        resources: NodeResources,
        adoption: RunnerAdoption,
    ) -> None:
        self._path = path
        self._loaded = loaded
        self._set_log_level = set_log_level
        self._ending = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._handing_over = False
        self._reloading: asyncio.Task[None] | None = None
        self._reload_again = False
        settings, memory = loaded.settings, loaded.settings.snapshot_memory_bytes
        around = Surroundings(
            node_id=settings.node_id,
            endpoints=settings.endpoints,
            environ=settings.job_environ(os.environ),
            address=settings.address or "",
            topology=settings.topology or "",
            progress_dir=settings.runtime_dir,
            # The jobs that there may be have equal shares.
            snapshot_memory=None if memory is None else memory // settings.capacity,
        )
        become_subreaper()
        self._folders = RunFolders(settings.state_dir)
        identity = node.daemon_identity(settings.node_id, adoption.instance)
        self.link = ServerLink(settings.endpoints, identity, credentials=settings.credentials())
        self.link.on_welcome = adoption.note_welcome
        uuids = frozenset(gpu.uuid for gpu in resources.gpus)
        self._health = NodeHealth(settings.checks(resources, os.environ), lambda: uuids)
        self._health.idle_interval_s = settings.health_interval_ms / 1000
        self.placements = Placements(
            self.link,
            resources,
            around,
            self._folders,
            RunnerRecords(settings.state_dir),
            adoption,
            self._health,
            settings.accounts(),
        )
        self.link.placements = self.placements
        self.link.metrics = self._metrics
        self.link.log_reader.past = self._folders.written

    @property
    def _settings(self) -> AgentSettings:
        return self._loaded.settings

    def describe(self) -> str:
        return describe(self.placements.resources)

    async def run(self, *, has_workers: bool) -> None:
        """Serve until a signal ends the agent; it may have adopted workers already."""
        with self._signals():
            if not has_workers:
                # The first Hello should contain the result. With workers to adopt there is no time
                # for the checks, because the server is waiting for the Hello.
                await self._health.look()
            async with asyncio.TaskGroup() as tasks:
                talk = tasks.create_task(self.link.run())
                sweep = tasks.create_task(self._sweep_logs())
                health = tasks.create_task(self._health.run())
                superseded = tasks.create_task(self._notice_superseded())
                systemd.notify("READY=1", f"STATUS={self.describe()}")
                await self._ending.wait()
                if self._handing_over:
                    await self.placements.hand_over(self._settings.restart_within_ms)
                else:
                    await self.placements.all_gone()
                    await self.link.log_reader.finish(node.LOG_FINISH_TIMEOUT_S)
                sweep.cancel()
                superseded.cancel()
                health.cancel()
                self._health.close()
                self.link.close()
                _, late = await asyncio.wait([talk], timeout=node.LINK_CLOSE_TIMEOUT_S)
                for task in late:
                    task.cancel()
        self.link.log_reader.stop_all()
        if self.link.superseded is not None:
            raise self.link.superseded

    @functools.cached_property
    def _agent_metrics(self) -> AgentMetrics:
        # The library is loaded once a server has asked.
        from rdzv.agent.node.agent_metrics import AgentMetrics

        metrics = AgentMetrics(self.link, self.placements)
        metrics.add_process()
        return metrics

    def _metrics(self) -> bytes:
        return self._agent_metrics.text()

    # ------------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for signum in END_SIGNALS:
            loop.add_signal_handler(signum, self._end, signum)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(HAND_OVER_SIGNAL, self._hand_over, HAND_OVER_SIGNAL.name)
        try:
            yield
        finally:
            for signum in (*END_SIGNALS, signal.SIGHUP, HAND_OVER_SIGNAL):
                loop.remove_signal_handler(signum)

    def _end(self, signum: signal.Signals) -> None:
        """Handle an end signal. If systemd's SIGTERM is part of a restart, hand over the jobs."""
        if self._handing_over:
            return
        if signum is signal.SIGTERM and not self._ending.is_set() and self._asking is None:
            self._asking = asyncio.create_task(self._ask_why(signum))
        else:
            self._leave(signum)

    async def _ask_why(self, signum: signal.Signals) -> None:
        job = await in_thread(systemd.queued_job)
        if self._ending.is_set():
            return  # Another signal has since ended the agent.
        if job in RESTARTS:
            self._hand_over(f"{signum.name} from systemd's {job}")
        else:
            self._leave(signum)

    def _hand_over(self, why: str) -> None:
        """Exit but leave the jobs running. Their runners wait for the next agent."""
        if self._handing_over or self._ending.is_set():
            return
        self._handing_over = True
        held = self.placements.holdings()
        jobs = ", ".join(holding.rdzv_id for holding in held) or "there are no jobs here"
        log.warning(
            "received %s; leaving this node's jobs to the next agent, which must start "
            "within %g s (`restart_within`): %s",
            why,
            self._settings.restart_within_ms / 1000,
            jobs,
        )
        systemd.notify("STOPPING=1", "STATUS=leaving its jobs to the next agent")
        if held:
            self.link.say_away(self._settings.restart_within_ms)
        self._ending.set()

    async def _notice_superseded(self) -> None:
        await self.link.is_superseded.wait()
        log.error("ending this agent: %s", self.link.superseded)
        self.placements.leave(signal.SIGTERM, "notice of supersession")
        self._ending.set()

    def _leave(self, signum: signal.Signals) -> None:
        held = self.placements.holdings()
        jobs = ", ".join(holding.rdzv_id for holding in held) or "there are no jobs here"
        log.warning("received %s; leaving every job: %s", signum.name, jobs)
        systemd.notify("STOPPING=1", "STATUS=leaving every job")
        self._leave_jobs(signum)
        self._ending.set()

    def _leave_jobs(self, signum: signal.Signals) -> None:
        if signum is not signal.SIGTERM or self._ending.is_set():
            self.placements.leave(signum, signum.name)
            return
        deadline_ms = self._settings.drain_deadline_ms
        # Saving and ending the workers may take longer than the unit's timeout.
        systemd.notify(f"EXTEND_TIMEOUT_USEC={(deadline_ms + END_MS) * 1000}")
        self.placements.take_no_more()
        self.link.drain_node(deadline_ms, f"its agent received {signum.name}")

    def _reload(self) -> None:
        self._reload_again = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload_all(), name="reload")

    async def _reload_all(self) -> None:
        while self._reload_again:
            self._reload_again = False
            try:
                await self._reload_once()
            except Exception:
                log.exception("did not reload the configuration because of a bug in rdzv-agent")

    async def _reload_once(self) -> None:
        """Reload the configuration. An invalid one changes nothing."""
        systemd.notify(systemd.reloading())
        try:
            # The folders named in it may be on a file server.
            found, _ = await in_time(READ_CONFIG_WITHIN_S, read_config, self._path)
            change = compare(self._loaded, found)
        except (ConfigurationError, InvalidRequestError, TimeoutError) as error:
            log.error("did not reload the configuration; nothing has changed: %s", error)
            systemd.notify("READY=1", "STATUS=the configuration has errors; see the log")
            return
        for line in change.lines or ("nothing in it has changed",):
            log.info("reloaded the configuration: %s", line)
        self._loaded = change.loaded
        self._apply()
        systemd.notify("READY=1", f"STATUS={self.describe()}")

    def _apply(self) -> None:
        settings, before = self._settings, self.placements.resources
        labels = tuple(sorted(settings.labels.items()))
        resources = replace(before, labels=labels, capacity=settings.capacity)
        self._set_log_level(settings.log_level)
        self.placements.change(resources, settings.job_environ(os.environ))
        if resources != before:
            self.link.say_hello_again()

    # ------------------------------------------------------------------ logs

    async def _sweep_logs(self) -> None:
        while True:
            logs = self._settings.logs
            try:
                removed = await in_thread(
                    self._folders.sweep, logs.keep_ms / 1000, logs.keep_size_bytes, time.time()
                )
            except Exception:
                # An error here must not affect any jobs.
                log.exception("cannot remove old logs")
            else:
                for path in removed:
                    log.info("removed old logs in %s", path)
            await asyncio.sleep(SWEEP_EVERY_S)


# ---------------------------------------------------------------------- directories


@contextlib.contextmanager
def _own_directories(settings: AgentSettings) -> Iterator[None]:
    # Job accounts can traverse it to reach their own folders, but cannot list it.
    mode = 0o711 if settings.user else 0o700
    for key, path in (("state_dir", settings.state_dir), ("runtime_dir", settings.runtime_dir)):
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(
                f"cannot create `{key}` = {str(path)!r}: {error.strerror}; give another"
            ) from error
        check_own(key, path, strictly=bool(settings.user))
    with locked("state_dir", settings.state_dir), locked("runtime_dir", settings.runtime_dir):
        yield


def _remove_leftovers(runtime_dir: Path, adopted: Iterable[AdoptedRunner]) -> None:
    in_use = {runner.state.progress_folder for runner in adopted}
    for path in runtime_dir.glob(f"{PROGRESS}*"):
        if path not in in_use:
            with contextlib.suppress(OSError):
                remove_tree(path, identity_of_owner(path, with_groups=False))


@contextlib.contextmanager
def locked(key: str, path: Path) -> Iterator[None]:
    """Hold a directory's lock, without following links that another account put there."""
    lock = path / "lock"
    try:
        fd = open_untrusted(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InvalidRequestError(
            f"`{key}` = {str(path)!r}: cannot write {lock}: {error.strerror}; give another"
        ) from error
    with os.fdopen(fd, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read(80).strip() or "another process"
            raise InvalidRequestError(
                f"`{key}` = {str(path)!r} is in use by {holder}; give this agent another"
            ) from error
        file.truncate(0)
        file.write(f"rdzv-agent pid {os.getpid()}\n")
        file.flush()
        yield
