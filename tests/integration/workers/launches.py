"""Stories of processes that launch with torch's `elastic_launch` more than once, as notebooks do.

    python launches.py ENDPOINT FOLDER alone|together [STORY...]

`together` runs all in this process, `alone` each in a fork that has launched nothing before. After
each, nothing of it may be left: no thread of rdzv in this process, and no node at the server.

Exits with 0 if all end as they should; anything else that happens is written to stderr.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# torch's log imports it with the first traceback, which costs each fork a second.
import torch._dynamo.config  # noqa: F401
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ENDPOINT, FOLDER = sys.argv[1], Path(sys.argv[2])
PATIENCE_S = 60.0
HANGS_S = 200.0
"""After this time stderr says in which story this process hangs, and it ends."""

faulthandler.dump_traceback_later(HANGS_S, exit=True)

_numbers = itertools.count()

Story = Callable[[str], None]


# ------------------------------------------------------------------ what workers do


def works() -> int:
    return int(os.environ["RANK"])


def fails() -> None:
    raise ValueError("it fails")


def fails_once() -> int:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("it fails")
    return 7


def fails_once_beside_one_that_waits(mark: str) -> int:
    """Fail as RANK 0 once RANK 1 waits; torch then stops that with SIGTERM."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if os.environ["RANK"] == "1":
            waits(mark)
        wait_until(Path(mark).with_suffix(".1").exists)
        raise ValueError("it fails")
    return 7


def waits(mark: str) -> None:
    Path(mark).with_suffix(f".{os.environ['RANK']}").touch()
    time.sleep(PATIENCE_S)


# ------------------------------------------------------------------ what stories are made of


def config(job: str, nodes: str = "1", workers: int = 1, **more: Any) -> LaunchConfig:
    low, _, high = nodes.partition(":")
    conf = {"last_call_timeout": "0", "close_timeout": "5", **more.pop("conf", {})}
    return LaunchConfig(
        min_nodes=int(low),
        max_nodes=int(high or low),
        nproc_per_node=workers,
        run_id=job,
        rdzv_backend="rdzv",
        rdzv_endpoint=ENDPOINT,
        rdzv_configs=conf,
        max_restarts=more.pop("max_restarts", 0),
        monitor_interval=0.05,
        start_method=more.pop("start_method", "fork"),
        **more,
    )


def job_name(story: str) -> str:
    return f"{story}-{os.getpid()}-{next(_numbers)}"


def succeed(of: LaunchConfig) -> None:
    ranks = range(of.nproc_per_node)
    assert elastic_launch(of, works)() == {rank: rank for rank in ranks}


def fail(of: LaunchConfig) -> None:
    try:
        elastic_launch(of, fails)()
    except ChildFailedError:
        return
    raise AssertionError("it has not failed")


def interrupt(of: LaunchConfig, signum: signal.Signals = signal.SIGINT) -> BaseException:
    """Launch, and send this process a signal once the workers run; return what was raised."""
    mark = FOLDER / job_name("mark")

    def send() -> None:
        ranks = range(of.nproc_per_node)
        wait_until(lambda: all(mark.with_suffix(f".{rank}").exists() for rank in ranks))
        os.kill(os.getpid(), signum)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        elastic_launch(of, waits)(str(mark))
    except (SignalException, KeyboardInterrupt) as error:
        sender.join()
        return error
    raise AssertionError("it was not interrupted")


def handler(job: str, nodes: str = "1", **conf: str) -> RendezvousHandler:
    low, _, high = nodes.partition(":")
    params = RendezvousParameters(
        "rdzv",
        ENDPOINT,
        job,
        int(low),
        int(high or low),
        last_call_timeout="0",
        close_timeout="1",
        timeout=900,
        **conf,
    )
    return rendezvous_handler_registry.create_handler(params)


def in_threads(*deeds: Callable[[], object]) -> list[Any]:
    results: dict[int, Any] = {}

    def do(number: int, deed: Callable[[], object]) -> None:
        results[number] = deed()

    threads = [threading.Thread(target=do, args=each) for each in enumerate(deeds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [results[number] for number in range(len(deeds))]


def wait_until(condition: Callable[[], object], found: Callable[[], object] = str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"it never came to that {found()}"
        time.sleep(0.02)


def raises(error: type[BaseException], deed: Callable[[], object]) -> None:
    try:
        deed()
    except error:
        return
    raise AssertionError(f"it has not raised {error.__name__}")


# ------------------------------------------------------------------ the stories


def once(job: str) -> None:
    succeed(config(job, workers=2))


def again_after_success(job: str) -> None:
    of = config(job)
    for _ in range(3):
        succeed(of)


def other_jobs_after_success(job: str) -> None:
    for number in range(3):
        succeed(config(f"{job}-{number}"))


def again_after_failure(job: str) -> None:
    of = config(job)
    fail(of)
    succeed(of)


def failure_after_failure(job: str) -> None:
    for _ in range(3):
        fail(config(job))


def success_failure_success(job: str) -> None:
    of = config(job)
    succeed(of)
    fail(of)
    succeed(of)


def again_after_a_restart(job: str) -> None:
    of = config(job, max_restarts=1)
    for _ in range(2):
        assert elastic_launch(of, fails_once)() == {0: 7}


def restarted_with_a_worker_that_waits(job: str) -> None:
    """The signal with which torch stops a fork is not meant for the launch."""
    of = config(job, workers=2, max_restarts=1)
    mark = str(FOLDER / job_name("mark"))
    assert elastic_launch(of, fails_once_beside_one_that_waits)(mark) == {0: 7, 1: 7}


def again_after_sigint(job: str) -> None:
    of = config(job)
    interrupt(of)
    succeed(of)


def again_after_sigterm(job: str) -> None:
    of = config(job)
    interrupt(of, signal.SIGTERM)
    succeed(of)


def again_after_a_signal_that_torch_misses(job: str) -> None:
    """It comes while a worker is forked: Python drops the exception of torch's handler there."""
    of, signals = config(job), [signal.SIGTERM]

    def send_once() -> None:
        if signals:
            os.kill(os.getpid(), signals.pop())

    os.register_at_fork(after_in_parent=send_once)
    launch = elastic_launch(of, waits)
    raises(SignalException, lambda: launch(str(FOLDER / job_name("mark"))))
    assert not signals
    succeed(of)


def again_after_two_interruptions(job: str) -> None:
    of = config(job, workers=2)
    for _ in range(2):
        interrupt(of)
    succeed(of)


def interrupted_with_the_error_kept(job: str) -> None:
    """As a notebook does, which keeps the last traceback, and all that its frames refer to."""
    error = interrupt(config(job))
    succeed(config(job))
    assert error.__traceback__ is not None


def interrupted_and_replaced(job: str) -> None:
    """A peer waits for the seat of a launch that was interrupted, and whose error is kept."""
    error = interrupt(config(job))
    peer = handler(job, node_id=f"peer-of-{job}")
    assert peer.next_rendezvous().world_size == 1
    peer.shutdown()
    assert error.__traceback__ is not None


def interrupted_while_it_waits(job: str) -> None:
    """No node has come yet, and no worker was started."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)

    def waits_for_a_round() -> bool:
        # Ctrl-C while a lock is being taken can leave it taken, in any Python program.
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        calls = [frame.f_code.co_name]
        while (frame := frame.f_back) is not None:
            calls.append(frame.f_code.co_name)
        return calls[0] == "wait" and "wait_for_round" in calls

    def send() -> None:
        wait_until(waits_for_a_round)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    raises(KeyboardInterrupt, elastic_launch(config(job, nodes="2"), works))
    signal.signal(signal.SIGINT, former)
    succeed(config(job))


def two_nodes_of_one_job(job: str) -> None:
    nodes = [handler(job, nodes="2") for _ in range(2)]
    infos = in_threads(*(node.next_rendezvous for node in nodes))
    assert sorted(info.rank for info in infos) == [0, 1]
    in_threads(*(node.shutdown for node in nodes))


def two_jobs_at_once(job: str) -> None:
    nodes = [handler(f"{job}-{number}") for number in range(2)]
    assert [node.next_rendezvous().world_size for node in nodes] == [1, 1]
    for node in nodes:
        node.shutdown()


def dropped_without_shutdown(job: str) -> None:
    handler(job).next_rendezvous()
    assert handler(job, nodes="1", join_timeout="30").next_rendezvous().world_size == 1


def dropped_before_it_has_joined(job: str) -> None:
    handler(job)
    succeed(config(job))


def dropped_in_a_cycle(job: str) -> None:
    node = handler(job)
    node.next_rendezvous()
    cycle: list[object] = [node]
    cycle.append(cycle)
    del node, cycle
    threading.Thread(target=gc.collect).start()
    succeed(config(job))


def dropped_while_it_has_not_met(job: str) -> None:
    """The other node of the round never comes to its store."""
    nodes = [handler(job, nodes="2", read_timeout="1") for _ in range(2)]
    for node in nodes:
        node.meet_nodes = lambda line: None
    in_threads(*(node.join for node in nodes))
    in_threads(*(node.wait_for_round for node in nodes))
    del nodes, node


def shut_down_twice(job: str) -> None:
    node = handler(job)
    node.next_rendezvous()
    assert node.shutdown()
    assert node.shutdown()
    raises(RendezvousClosedError, node.next_rendezvous)
    succeed(config(job))


def outside_the_main_thread(job: str) -> None:
    in_threads(lambda: succeed(config(job)))
    in_threads(lambda: fail(config(job)))
    succeed(config(job))


def spawned_after_an_interruption(job: str) -> None:
    interrupt(config(job))
    succeed(config(job, start_method="spawn"))


def refused_and_mended(job: str) -> None:
    raises(ValueError, lambda: succeed(config(job, conf={"scale_up": "never"})))
    succeed(config(job))


def closed_by_another(job: str) -> None:
    """One that has not joined ends the run of those that have."""
    node = handler(job)
    node.next_rendezvous()
    stranger, other = handler(job), handler(job)
    assert not other.is_closed()
    stranger.set_closed()
    assert other.is_closed()
    assert node.is_closed()
    wait_until(node.num_nodes_waiting)
    raises(RendezvousClosedError, node.next_rendezvous)
    raises(RendezvousClosedError, stranger.next_rendezvous)
    raises(RendezvousClosedError, other.next_rendezvous)
    assert stranger.is_closed()
    node.shutdown()
    assert not handler(job).is_closed()
    succeed(config(job))


STORIES = (
    once,
    again_after_success,
    other_jobs_after_success,
    again_after_failure,
    failure_after_failure,
    success_failure_success,
    again_after_a_restart,
    restarted_with_a_worker_that_waits,
    again_after_sigint,
    again_after_sigterm,
    again_after_a_signal_that_torch_misses,
    again_after_two_interruptions,
    interrupted_with_the_error_kept,
    interrupted_and_replaced,
    interrupted_while_it_waits,
    two_nodes_of_one_job,
    two_jobs_at_once,
    dropped_without_shutdown,
    dropped_before_it_has_joined,
    dropped_in_a_cycle,
    dropped_while_it_has_not_met,
    shut_down_twice,
    outside_the_main_thread,
    spawned_after_an_interruption,
    refused_and_mended,
    closed_by_another,
)


# ------------------------------------------------------------------ telling them


def tell(story: Story) -> bool:
    job = job_name(story.__name__)
    began_s = time.monotonic()
    handled = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        story(job)
        leave_nothing(job)
    except BaseException:
        traceback.print_exc()
        print(f"{story.__name__}: FAILED", file=sys.stderr, flush=True)
        return False
    finally:
        for signum, action in handled.items():
            signal.signal(signum, action)
    took_s = time.monotonic() - began_s
    print(f"{story.__name__}: as it should, {took_s:.1f} s", file=sys.stderr, flush=True)
    return True


def leave_nothing(job: str) -> None:
    # Not before: forks of a process that has used gRPC are part of this test.
    from rdzv.client import ControlClient, parse_endpoint

    def threads() -> list[str]:
        gc.collect()
        return [t.name for t in threading.enumerate() if t.name.startswith("rdzv")]

    wait_until(lambda: not threads(), threads)
    with ControlClient(parse_endpoint(ENDPOINT)) as client:
        for found in client.jobs():
            if found.rdzv_id.startswith(job):
                nodes = client.status(found.rdzv_id).nodes
                there = [n.node_id for n in nodes if n.state not in ("left", "succeeded")]
                assert not there, f"{there} are still in {found.rdzv_id}"


def together(stories: Sequence[Story]) -> bool:
    ended = [tell(story) for story in stories]
    return all(ended)


def alone(stories: Sequence[Story]) -> bool:
    """Run two at a time."""
    ended = []
    for number, story in enumerate(stories):
        if number >= 2:
            ended.append(os.wait()[1])
        if not os.fork():
            os._exit(not tell(story))
    ended += [os.wait()[1] for _ in stories[:2]]
    return not any(ended)


if __name__ == "__main__":
    told = [story for story in STORIES if not sys.argv[4:] or story.__name__ in sys.argv[4:]]
    gc.freeze()  # Imported modules are not garbage of the stories.
    sys.exit(not {"together": together, "alone": alone}[sys.argv[3]](told))
