"""The rendezvous handler that torch's agent calls.

torch calls it from its main thread. Messages from the server arrive in a second thread, and signals
in a third; a single lock guards their shared state (`conversation`).

A process may have many handlers, one after another or at once: a notebook calls
`elastic_launch(...)()` repeatedly. Each handler is a separate node, and leaves when its launch is
over, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from rdzv import errors
from rdzv.client import ControlClient
from rdzv.torchrun.conversation import PartPhase, Talk
from rdzv.torchrun.plugin_options import PluginOptions, agent_has_run
from rdzv.torchrun.round_store import AgentStore, in_thread, meet, shares_store
from rdzv.torchrun.sync_stream import NodeStream
from rdzv.v1 import rdzv_pb2 as pb

log = logging.getLogger("rdzv.torchrun")

EXPLAIN_TIMEOUT_S = 10.0
"""How long to wait for the server to end a round whose store failed, for example with its host."""


class RdzvHandler(RendezvousHandler):
    """One torchrun's part in a job. It joins at the first `next_rendezvous`."""

    def __init__(self, options: PluginOptions) -> None:
        self._options = options
        self.talk = Talk(options)
        self._news = self.talk.news
        self._joined_at_s = 0.0
        self._has_closed = False
        self._seen_run = ""
        """The first run that `is_closed` found open, for a node that has not joined."""
        # An interrupted launch makes no further calls. At exit, the conversation ends by itself.
        weakref.finalize(self, self.talk.abandon).atexit = False

    # ------------------------------------------------------------------ calls by torch

    def get_backend(self) -> str:
        return "rdzv"

    def get_run_id(self) -> str:
        """Return the job's name.

        A launch that a signal ends does not call `shutdown`. But it calls this once more, for
        torch's own event, when the workers are gone (`launch_agent`, `get_event_failed`). This node
        then leaves, so no other node waits for it, and the process may launch again.
        """
        error = sys.exc_info()[1]
        if isinstance(error, SignalException) and agent_has_run():
            self.talk.end(pb.Leave.SIGNAL, f"received {error.sigval.name}")
        return self._options.rdzv_id

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers meet in the agents' store.

        They do, because each round has its own store, without keys from earlier attempts. torch's
        agent reads this after every `next_rendezvous` (`_start_workers`).
        """
        return shares_store()

    def next_rendezvous(self) -> RendezvousInfo:
        """Join, wait until the round is complete, and meet its other nodes.

        No workers may be left on this node. A spare waits here until there is a seat or the job has
        ended.

        Raises:
            RendezvousClosedError: the job has failed, or was stopped.
            RendezvousTimeoutError: there were too few nodes for join_timeout.
            RendezvousConnectionError: no server could be reached for join_timeout, or the other
                nodes could not be met.
            RendezvousError: the server refuses this node; the message says why.
            SignalException: a signal that ends this torchrun arrived, and torch's agent missed
                it: Python drops exceptions that a signal handler raises inside some callbacks,
                such as those after a fork (`os.register_at_fork`).
            SystemExit: the job has succeeded without this node. torch's own exception for this,
                `RendezvousGracefulExitError`, makes torchrun fail with an AttributeError
                (`launch_agent` calls a method of the missing result).
        """
        while True:
            self.join()
            line = self.wait_for_round()
            info = self.meet_nodes(line)
            if info is not None:
                # As in rdzvrun; torch's agent passes its own environment to the workers.
                os.environ["RDZV_ROUND"] = str(line.round)
                return info

    def num_nodes_waiting(self) -> int:
        """Return nonzero once the round is over and the workers must be restarted."""
        with self._news:
            return int(self.talk.round_is_over)

    def is_closed(self) -> bool:
        """Return whether the job forms no more rounds, also because another node has closed it.

        Unless this node has heard of it, it asks the server. Once True, it stays so. Only a run
        counts that this node has joined, or that an earlier call found open: where another was
        closed, a node that joins now begins the next one.

        Raises:
            RendezvousConnectionError: no server could be reached, so it is not known.
            RendezvousError: the server refuses to answer; the message has the reason.
        """
        with self._news:
            if self.talk.ended or self._has_closed:
                return True
            run = self.talk.run or self._seen_run
        with self._asking() as client, contextlib.suppress(errors.UnknownJobError):
            present = client.status(self._options.rdzv_id)
            if run:
                self._has_closed = present.closed or present.run != run
            elif not present.closed:
                self._seen_run = present.run or ""
        return self._has_closed

    def set_closed(self) -> None:
        """End the job's current run, as `rdzvctl stop` does: its nodes are notified, and stop.

        The node need not have joined. If the job has no run, nothing is stopped, and this node will
        not begin one.

        Raises:
            RendezvousConnectionError: no server could be reached.
            RendezvousError: the server refuses to stop the run; the message has the reason.
        """
        name, why = self._options.rdzv_id, f"{self._options.node_id} has closed it (set_closed)"
        no_run = errors.UnknownJobError, errors.RendezvousClosedError
        with self._asking() as client, contextlib.suppress(*no_run):
            client.stop(name, client.status(name).run or "", why)
        self._has_closed = True

    @contextlib.contextmanager
    def _asking(self) -> Iterator[ControlClient]:
        """Yield a client, and raise its errors as torch's."""
        options = self._options
        try:
            with ControlClient(options.endpoints, credentials=options.credentials) as client:
                yield client
        except errors.RendezvousConnectionError as error:
            raise RendezvousConnectionError(str(error)) from error
        except errors.RendezvousError as error:
            raise RendezvousError(str(error)) from error

    def shutdown(self) -> bool:
        """Report to the server how this node's part in the job ended, and close the stream.

        No workers may be left. If an exception is being raised (`launch_agent` calls this in its
        `finally`), it determines what is reported. Without one, the workers have succeeded, and
        this waits for the other nodes to succeed, because this process may be serving their store.
        An exception that a caller further up is handling counts as well: a failure must not be
        reported as a success.
        """
        error = sys.exc_info()[1]
        if self.talk.stream is None or self.talk.hung_up:
            return True
        with self._news:
            if error is None and self.talk.phase in (PartPhase.RUNNING, PartPhase.SUCCEEDED):
                self._wait_for_success()
            elif isinstance(error, ChildFailedError) and self.talk.phase is PartPhase.RUNNING:
                self.talk.report_failures(_worker_failures(error))
        self.talk.end(*_why_leave(error))
        return True

    # ------------------------------------------------------------------ joining

    def join(self) -> None:
        """Report that this node has no workers, and ask for a place in the next round."""
        with self._news:
            if self.talk.hung_up or self._has_closed:
                did = "left" if self.talk.hung_up else "closed"
                raise RendezvousClosedError(f"this node has {did} {self._options.rdzv_id}")
            self._raise_if_signalled()
            self._raise_if_ended()
            self._joined_at_s = time.monotonic()
            self.talk.join()
            if self.talk.stream is None:
                self.talk.begin(NodeStream(self.talk))

    def wait_for_round(self) -> pb.Assignment:
        """Wait until a round is complete in which this node takes part; return its place there."""
        with self._news:
            while self.talk.phase is PartPhase.JOINING:
                self._raise_if_ended()
                self._raise_if_apart()
                self._news.wait(1.0)
            self._raise_if_signalled()
            if self.talk.line is None or self.talk.phase is not PartPhase.RUNNING:
                raise RendezvousClosedError(f"this node is leaving {self._options.rdzv_id}")
            return self.talk.line

    def _raise_if_signalled(self) -> None:
        signum = self.talk.signalled
        if signum is not None:
            raise SignalException(f"process {os.getpid()} received {signum.name}", signum)

    def _raise_if_ended(self) -> None:
        rdzv_id, closed, refused = self._options.rdzv_id, self.talk.closed, self.talk.refused
        if refused is not None:
            of_torch = refused.code == errors.RendezvousClosedError.code
            raise (RendezvousClosedError if of_torch else RendezvousError)(refused.message)
        if closed is None:
            return
        if closed.result == pb.RESULT_SUCCEEDED:
            log.info("%s has succeeded without this node: %s", rdzv_id, closed.reason)
            raise SystemExit(0)
        result = "was stopped" if closed.result == pb.RESULT_STOPPED else "has failed"
        kind = RendezvousTimeoutError if closed.retry_sensible else RendezvousClosedError
        raise kind(f"{rdzv_id} {result}: {closed.reason}")

    def _raise_if_apart(self) -> None:
        """Raise if no server has been connected for join_timeout since this node joined."""
        stream, timeout_s = self.talk.stream, self._join_timeout_s
        assert stream is not None
        if stream.apart_since_s is None:
            return
        # Time before the join does not count, because the workers kept running without a server.
        # A server that accepts the stream and then refuses the node does not put the end off.
        since_s = self._joined_at_s
        if self.talk.run:
            since_s = max(stream.apart_since_s, since_s)
        if time.monotonic() - since_s >= timeout_s:
            raise RendezvousConnectionError(
                f"no server for {timeout_s:g} s (join_timeout): {stream.trouble}"
            )

    @property
    def _join_timeout_s(self) -> float:
        return self._options.settings.join_timeout_ms / 1000

    # ------------------------------------------------------------------ meeting

    def meet_nodes(self, line: pb.Assignment) -> RendezvousInfo | None:
        """Meet the other nodes in the round's store; return None if the round ends first."""
        talk = self.talk
        listening = talk.store_socket.take()
        if line.group_rank != 0 and listening is not None:
            listening.close()
            listening = None
        timeout_s = self._options.read_timeout_s

        def wrap(store: Store) -> AgentStore:
            return AgentStore(store, talk.on_success, lambda: talk.why_over(line))

        # The thread may never end, so it holds no reference to this handler.
        work = in_thread(lambda: meet(line, listening, wrap, timeout_s), talk.notify)
        with self._news:
            self._news.wait_for(lambda: talk.round_is_over or work.done(), timeout_s)
            if not talk.round_is_over:
                if work.done() and work.exception() is None:
                    return work.result()
                self._explain_failure(line, work)
        return None

    def _explain_failure(self, line: pb.Assignment, work: Future[RendezvousInfo]) -> None:
        """Wait for the server to end a round whose nodes could not meet.

        GROUP_RANK 0 reports the failed store. The others wait for the server to find that
        GROUP_RANK 0 is lost.
        """
        error = work.exception() if work.done() else None
        why = f"{type(error).__name__}: {_first_line(error)}" if error else "not all nodes came"
        where = f"{line.master_addr}:{line.master_port}"
        if line.group_rank == 0:
            self.talk.report_store(f"the store at {where}: {why}")
        if not self._news.wait_for(lambda: self.talk.round_is_over, EXPLAIN_TIMEOUT_S):
            raise RendezvousConnectionError(
                f"the nodes of round {line.round} did not meet in the store at {where} "
                f"({why}); if this address cannot be reached from here, start that node "
                "with another --local-addr"
            )

    # ------------------------------------------------------------------ the end

    def _wait_for_success(self) -> None:
        self.talk.on_success()
        if not self._news.wait_for(lambda: self.talk.round_is_over, self._options.close_timeout_s):
            log.warning(
                "the other nodes of %s have not succeeded within %g s (close_timeout); no "
                "longer waiting",
                self._options.rdzv_id,
                self._options.close_timeout_s,
            )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# ------------------------------------------------------------------ how it ends


def _why_leave(error: BaseException | None) -> tuple[pb.Leave.Cause.ValueType, str]:
    """Return why this node is leaving, given the exception (if any) raised by torch's launcher."""
    match error:
        case None:
            return pb.Leave.SIGNAL, "its workers have succeeded"
        case ChildFailedError():
            rank, failure = error.get_first_failure()
            reason = f"rank {rank} failed (exit code {failure.exitcode}), and no restart is left"
            return pb.Leave.FAILED, reason
        case RendezvousTimeoutError() | RendezvousConnectionError():
            return pb.Leave.TIMEOUT, _first_line(error)
        case Exception():
            return pb.Leave.START_FAILED, f"{type(error).__name__}: {_first_line(error)}"
        case _:
            return pb.Leave.SIGNAL, type(error).__name__


def _worker_failures(error: ChildFailedError) -> list[pb.WorkerFailure]:
    """Return the failures that end this torchrun, without the workers that torch then stopped."""
    first, _ = error.get_first_failure()
    return [
        _worker_failure(rank, failure)
        for rank, failure in error.failures.items()
        if rank == first or failure.exitcode != -signal.SIGTERM
    ]


def _worker_failure(rank: int, failure: ProcessFailure) -> pb.WorkerFailure:
    """Convert torch's record of a failure to a message.

    The record's `message` is a sentence, or the data written by `@record`
    (`torch/distributed/elastic/multiprocessing/errors`).
    """
    message, traceback = failure.message, ""
    if isinstance(message, dict):
        traceback = str(message.get("extraInfo", {}).get("py_callstack", ""))
        message = str(message.get("message", ""))
    report = pb.WorkerFailure(
        local_rank=failure.local_rank,
        rank=rank,
        pid=failure.pid,
        message=message,
        traceback=traceback,
        age_ms=max(round((time.time() - failure.timestamp) * 1000), 0),
    )
    if failure.exitcode < 0:
        report.signal = -failure.exitcode
    else:
        report.exit_code = failure.exitcode
    return report
