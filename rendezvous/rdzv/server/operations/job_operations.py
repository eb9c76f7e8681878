"""Changes to jobs that operators can request: submit, stop, restart, scale and forget."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rdzv.core.commands import Command, Submit
from rdzv.core.model import State
from rdzv.errors import RendezvousError
from rdzv.server.security import roles
from rdzv.server.security.callers import ANYBODY, Caller
from rdzv.structs import replace
from rdzv.view.answers import JobStatus

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.driver")


class JobOperations:
    """Makes changes to one server's jobs."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

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

        state = await self._driver.jobs.look(rdzv_id)
        if command.run != state.membership.run:
            self._driver.placer.check_placeable(command.spec)
        command = replace(command, spec=replace(command.spec, submitter=caller.name))
        await self._driver.engine.submit(rdzv_id, command, guard)
        await self._driver.placer.place()
        return await self._driver.views.status(rdzv_id)

    async def obey(self, rdzv_id: str, command: Command) -> JobStatus:
        """Stop, restart or scale a job as an operator requested, and return its new view.

        Raises:
            UnknownJobError: no such job is known.
            RendezvousClosedError: the given run has ended.

        """
        await self._driver.views.state(rdzv_id)
        return self._driver.views.of(await self._driver.engine.submit(rdzv_id, command))

    async def forget(self, rdzv_id: str) -> None:
        """Delete a job that has ended together with its history; see `Forgetting.forget`."""
        await self._driver.forgetting.forget(rdzv_id)
        try:
            await self._driver.diagnosis.stack_archive.forget(rdzv_id)
        except RendezvousError as error:
            log.warning(
                "could not delete the stacks of %s, which are kept until newer ones replace them: "
                "%s",
                rdzv_id,
                error,
            )
        self._driver.watchers.job_changed(rdzv_id)
