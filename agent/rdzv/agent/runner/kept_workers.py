"""Brings a parked worker into a round: opens its output files and orders it to continue."""

from __future__ import annotations

import socket
from functools import partial

from .descriptors import close_fds
from .spawn import Program, reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .child_exits import Child, Children
    from .held_round import Round
    from .requests import KeepSpec, WorkerSpec
    from .worker_links import WorkerLink
    from .workers import Workers


class KeptStart:
    """A parked worker that is about to enter a round, until its order has been sent.

    If the round ends before that, the worker stays parked.
    """

    def __init__(
        self,
        workers: Workers,
        children: Children,
        started: Round,
        spec: WorkerSpec,
        keep: KeepSpec,
        link: WorkerLink,
    ) -> None:
        self._workers = workers
        self._children = children
        self._round = started
        self._spec = spec
        self._keep = keep
        self._link = link

    def begin(self) -> None:
        """Open the output files in a child, with the account's rights, and send the order.

        The child gives them to the worker itself: closing a job's file may take as long as the
        job's file system likes, so this process never holds one.
        """
        spec = self._spec
        if spec.stdout is None and spec.stderr is None:
            self._go(())
            return
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._fail(reason_of(error))
            return
        with theirs:
            program = Program(
                argv=(),
                env={},
                shares_stdin=True,
                stdout=spec.stdout,
                stderr=spec.stderr,
                pass_fds=(theirs.fileno(),),
                sends_streams_to=theirs.fileno(),
                identity=spec.identity,
            )
            try:
                self._children.start(
                    f"the process that opens the output of local_rank {spec.local_rank}",
                    program,
                    partial(self._end_opener, ours),
                    on_run=lambda _: self._go((ours.detach(),)),
                )
            except OSError as error:
                ours.close()
                self._fail(reason_of(error))

    def _end_opener(self, streams: socket.socket, child: Child, code: int) -> None:
        streams.close()
        if code != 0:
            self._fail(child.failure or f"it ended with {code}")

    def _fail(self, reason: str) -> None:
        if self._round.kill_at is None:
            number, local_rank = self._round.number, self._spec.local_rank
            reason = f"round {number}: cannot open the output of local_rank {local_rank}: {reason}"
            self._workers.fail_start(self._round, self._spec, reason)

    def _go(self, fds: tuple[int, ...]) -> None:
        parked, link, spec = self._workers.parked, self._link, self._spec
        if self._round.kill_at is not None or link not in parked.waiting():
            close_fds(fds)  # The round or the worker is ending.
            return
        assert link.child is not None
        parked.remove(link, partial(self._workers.end_worker, self._round, spec))
        link.go(spec, self._round.number, self._keep.source, self._keep.step, fds)
        self._round.add(link.child, link)
        self._workers.report_start(self._round, spec, "kept", link.child)
