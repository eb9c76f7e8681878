"""Changes to jobs that operators can request: submit, stop, restart, scale and forget."""

from __future__ import annotations

import logging

from rdzv.core.commands import Command, Submit
from rdzv.core.model import State
from rdzv.errors import RendezvousError
from rdzv.server.diagnosis.stack_archive import StackArchive
from rdzv.server.engine.decide_persist_publish import Engine
from rdzv.server.engine.forgetting import Forgetting
from rdzv.server.engine.watchers import Watchers
from rdzv.server.operations.job_views import JobViews
from rdzv.server.scheduling.placing import Placer
from rdzv.server.security import roles
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.structs import replace
from rdzv.view.answers import JobStatus

log = logging.getLogger("rdzv.driver")


class JobOperations:
    """Makes changes to one server's jobs."""

    def __init__(
        self,
        engine: Engine,
        *,
        forgetting: Forgetting,
        views: JobViews,
        placer: Placer,
        stack_archive: StackArchive,
        watchers: Watchers,
    ) -> None:
        self._engine = engine
        self._forgetting = forgetting
        self._views = views
        self._placer = placer
        self._stack_archive = stack_archive
        self._watchers = watchers

    async def submit_job(
        self, rdzv_id: str, command: Submit, caller: Caller = ANYBODY
    ) -> JobStatus:
        """Begin a run whose nodes the server chooses, and return the job's new view.

        Raises:
            DeniedError: the job does not belong to the caller.
            JobExistsError: a run of the job has not ended.
            InvalidRequestError: no known node could ever run the job.

        """

        def guard(state: State) -> None:
            roles.refuse_others_job(caller, state, "submit")

        state = await self._engine.jobs.look(rdzv_id)
        if command.run != state.membership.run:
            self._placer.check_placeable(command.spec)
        command = replace(command, spec=replace(command.spec, submitter=caller.name))
        await self._engine.submit(rdzv_id, command, guard)
        await self._placer.place()
        return await self._views.status(rdzv_id)

    async def obey(self, rdzv_id: str, command: Command) -> JobStatus:
        """Stop, restart or scale a job as an operator requested, and return its new view.

        Raises:
            UnknownJobError: no such job is known.
            RendezvousClosedError: the given run has ended.

        """
        await self._views.state(rdzv_id)
        return self._views.of(await self._engine.submit(rdzv_id, command))

    async def forget(self, rdzv_id: str) -> None:
        """Delete a job that has ended together with its history; see `Forgetting.forget`."""
        await self._forgetting.forget(rdzv_id)
        try:
            await self._stack_archive.forget(rdzv_id)
        except RendezvousError as error:
            log.warning(
                "could not delete the stacks of %s, which are kept until newer ones replace them: "
                "%s",
                rdzv_id,
                error,
            )
        self._watchers.job_changed(rdzv_id)
