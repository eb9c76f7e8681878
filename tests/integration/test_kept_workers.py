"""Workers that stay, with real processes and gloo: how rounds end, and how the next begin."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import QUICK_TORCH, descendants
from kept_workers import Worker, World, world

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]


def at(rank: int, step: int, where: str, do: str, round_: int = 0, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "step": step, "at": where, "do": do, "round": round_, **more}


def losses(workers: list[Worker]) -> dict[tuple[int, int], str]:
    """Return the loss of each step and rank; of a repeated step, the last."""
    return {(row["step"], row["rank"]): row["loss"] for one in workers for row in one.lines("step")}


def finish(made: World) -> list[dict[str, Any]]:
    codes = [worker.exit_code() for worker in made.workers]
    assert codes == [0] * len(codes), [worker.text() for worker in made.workers]
    return [worker.lines("done")[0] for worker in made.workers]


# ------------------------------------------------------------------ a peer is lost


@pytest.mark.parametrize("where", ["forward", "collective", "backward", "step", "commit"])
def test_the_others_of_a_killed_worker_go_on_in_their_processes(tmp_path: Path, where: str) -> None:
    with world(tmp_path, steps=10, faults=[at(2, 5, where, "kill")]) as made:
        first, second, lost = made.begin(3)
        assert lost.exit_code() == -signal.SIGKILL
        parked = made.end([first, second])
        step = max(one["step"] for one in parked)
        assert step in (5, 6) and not any(one["torn"] for one in parked)
        made.begin(3, [first, second], step=step)
        resumed = made.resumed()
        assert [one["step"] for one in resumed] == [step] * 3
        assert resumed[2]["healed"]
        done = finish(made)
        assert [one["pid"] for one in done[:2]] == [first.pid, second.pid]
        assert [one["history"] for one in done] == [10] * 3


def test_every_sample_is_seen_once_an_epoch_though_a_worker_is_lost_and_not_replaced(
    tmp_path: Path,
) -> None:
    # 96 samples: 5 steps of 3 x 4, then 4 of 2 x 4 and a last one with the rest.
    with world(tmp_path, steps=10, faults=[at(2, 5, "collective", "kill")]) as made:
        first, second, lost = made.begin(3)
        lost.exit_code()
        made.end([first, second])
        made.begin(2, [second, first], step=5)
        finish(made)
        steps = [row for one in (first, second, lost) for row in one.lines("step")]
        # Step 6 began in both rounds; only the second one's result counts.
        done = [
            index
            for row in steps
            if (row["step"] <= 5) == (row["round"] == 0)
            for index in row["samples"]
        ]
        assert Counter(done) == Counter(range(96))


def test_a_stopped_peer_holds_nobody_up(tmp_path: Path) -> None:
    with world(tmp_path, steps=8, faults=[at(1, 4, "collective", "stop")]) as made:
        first, stopped, third = made.begin(3)
        stopped.wait_line("fault")
        time.sleep(0.1)  # Until the others wait for it.
        begun = time.monotonic()
        made.end([first, third])
        assert time.monotonic() - begun < 20  # Of gloo's 30 minutes; they need milliseconds.
        made.begin(3, [first, third], step=4)
        finish(made)


@pytest.mark.parametrize("operation", range(8))
def test_a_peer_that_stops_while_groups_are_made_holds_nobody_up(
    tmp_path: Path, operation: int
) -> None:
    with world(tmp_path, steps=3) as made:
        made.begin(3, stops_at=[1, operation])
        stopped = made.workers[1]
        stopped.wait_line("stops")
        time.sleep(0.3)
        others = [made.workers[0], made.workers[2]]
        parked = made.end(others)
        assert [one["step"] or 0 for one in parked] == [0, 0]
        made.begin(3, others, stops_at=None)
        finish(made)


def test_a_rank_that_was_told_to_leave_saves_and_ends_though_others_train_on(
    tmp_path: Path,
) -> None:
    with world(tmp_path, "until_told") as made:
        stays, leaves = made.begin(2)
        made.resumed()
        made.notice_file(1).touch()
        assert leaves.exit_code() == 0
        assert leaves.lines("saved") and leaves.lines("returned")
        made.end([stays])
        made.begin(1, [stays])
        made.notice_file(0).touch()
        assert stays.exit_code() == 0


# ------------------------------------------------------------------ whose failure


def test_the_scripts_own_exception_is_raised_at_once(tmp_path: Path) -> None:
    with world(tmp_path, steps=8, faults=[at(1, 4, "forward", "raise")]) as made:
        first, failing = made.begin(2)
        assert failing.exit_code() == 1
        assert "ValueError: the script's own mistake" in failing.text()
        with pytest.raises(AssertionError, match="the worker is gone"):
            failing.expect("suspect")
        assert "gloo" in first.expect("suspect")["message"]
        assert first.expect("parked")["step"] == 4


def test_an_exception_in_a_collective_without_a_lost_peer_is_suspect(tmp_path: Path) -> None:
    """A collective that only one rank calls times out; no other worker failed, so it is charged."""
    faults = [at(rank, 4, "forward", "time out") for rank in (0, 1)]
    with world(tmp_path, steps=8, faults=faults) as made:
        first, _ = made.begin(2)
        said = first.expect("suspect")
        assert "imed out" in said["message"]
        assert "in one_step" in said["traceback"]
        first.expect("parked")
        first.send({"type": "release", "reason": "nothing else has failed"})
        assert first.exit_code() == 1
        assert "in one_step" in first.text() and "RuntimeError" in first.text()


def test_a_parked_worker_without_a_runner_ends(tmp_path: Path) -> None:
    with world(tmp_path, steps=10_000) as made:
        (only,) = made.begin(1)
        made.resumed()
        made.end()
        only.link.close()
        assert only.exit_code() == 1
        assert "the runner of this worker is gone" in only.text()


@pytest.mark.parametrize(
    ("where", "holds_connections", "torn", "more"),
    [
        ("forward", True, False, {}),  # It fails with the end of the round,
        ("forward", False, False, {}),  # and before it.
        ("forward", False, False, {"steps_on": True}),
        ("between", True, True, {}),
        ("between", False, True, {}),
    ],
)
def test_a_step_is_not_committed_if_the_script_caught_its_failure(
    tmp_path: Path, where: str, holds_connections: bool, torn: bool, more: dict[str, Any]
) -> None:
    faults = [at(1, 4, where, "kill")]
    with world(tmp_path, "swallowing", steps=7, faults=faults, **more) as made:
        made.holds_connections = holds_connections
        first, lost = made.begin(2)
        assert lost.exit_code() == -signal.SIGKILL
        refused = "rank 0: warning: step 5 is not committed"
        if not holds_connections:
            first.wait_text(refused)
        (parked,) = made.end([first])
        assert refused in first.text()
        assert (parked["step"], parked["torn"]) == (4, torn)
        if not torn:
            made.begin(2, [first], step=4)
            assert [(one["step"], one["applied"]) for one in finish(made)] == [(7, [7, 7])] * 2


def test_a_timeout_that_the_script_caught_is_reported_at_the_commit(tmp_path: Path) -> None:
    faults = [at(1, 4, "forward", "sleep", seconds=600)]
    with world(tmp_path, "swallowing", steps=7, faults=faults, timeout_s=1.0) as made:
        first, _ = made.begin(2)
        first.wait_line("swallowed", deadline_s=30, step=4)
        said = first.expect("suspect", deadline_s=10)
        assert "step 5 is not committed: a connection has ended" in said["message"]
        assert first.expect("parked")["step"] == 4
        assert [row["step"] for row in first.lines("swallowed")] == [4]


# ------------------------------------------------------------------ bits


def history(folder: Path, sizes: list[int], faults: list[dict[str, Any]], steps: int) -> World:
    """Train in rounds of several sizes; each but the last ends with a fault.

    Sums of three ranks depend on their order, and DDP changes it after the first step of a round.
    """
    with world(folder, steps=steps, faults=faults, settles=True) as made:
        kept: list[Worker] = []
        for number, size in enumerate(sizes):
            made.begin(size, kept[:size])
            if number < len(sizes) - 1:
                resting = [one for one in faults if one["round"] == number]
                for one in resting:
                    made.workers[one["rank"]].wait_line("fault", round=number)
                made.end()
            kept = list(made.workers)
        finish(made)
        return made


def test_losses_are_those_of_a_run_that_nothing_disturbed(tmp_path: Path) -> None:
    """Rounds end in the middle of steps, at every place; no worker is lost."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    undisturbed = history(tmp_path / "a", [3], [], 26)
    places = ["forward", "collective", "backward", "step", "commit", "forward"]
    faults = [
        at(number % 3, 3 + 4 * number, where, "sleep", number, seconds=0.3)
        for number, where in enumerate(places)
    ]
    disturbed = history(tmp_path / "b", [3] * 7, faults, 26)
    expected, found = losses(undisturbed.all), losses(disturbed.all)
    # If a rank's peer had sealed one more step, the rank has received it and prints no loss for it.
    assert len(expected) == 78 and len(found) >= 66
    assert found == {place: expected[place] for place in found}
    ends = [
        [one.lines("done")[0]["weights"] for one in made.all] for made in (undisturbed, disturbed)
    ]
    assert ends[0] == ends[1]


# ------------------------------------------------------------------ healing


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("bucket", [0, 1, 2, 4])
def test_a_source_that_dies_while_it_heals_leaves_no_mixture(
    tmp_path: Path, bucket: int, behind: bool
) -> None:
    """One rank is new, another perhaps a step behind: it stays complete, and is the next source."""
    faults: list[dict[str, Any]] = [
        {"rank": 0, "round": 1, "bucket": bucket},
        at(2, 5, "backward" if behind else "collective", "kill"),
    ]
    if behind:
        faults.append(at(1, 5, "backward", "sleep", seconds=0.5))
    with world(tmp_path, steps=9, faults=faults) as made:
        first, second, lost = made.begin(3)
        lost.exit_code()
        parked = made.end([first, second])
        assert [one["step"] for one in parked] == ([6, 5] if behind else [5, 5])
        *_, third = made.begin(3, [first, second], step=parked[0]["step"])
        assert first.exit_code() == -signal.SIGKILL
        after = made.end([second, third])
        assert (after[0]["step"], after[0]["torn"]) == (5, False)
        assert after[1]["torn"]
        *_, fourth = made.begin(3, [third, second], step=5)
        assert [one["source"] for one in made.resumed()] == [1, 1, 1]
        begun = [one.wait_line("begin", round=2) for one in (second, third, fourth)]
        assert len({one["weights"] for one in begun}) == 1
        assert [one["history"] for one in finish(made)] == [9] * 3


# ------------------------------------------------------------------ what stays


def test_fifty_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    rounds = 52
    with world(tmp_path, steps=100_000) as made:
        # As a runner does; else one cut in many ends only at gloo's timeout.
        made.holds_connections = True
        kept: list[Worker] = []
        seen: list[tuple[int, int, int]] = []
        for number in range(rounds):
            made.begin(2, kept)
            made.resumed()
            kept = list(made.workers)
            kept[0].wait_line("begin", round=number)
            made.end()
            seen.append(kept[0].resources(seen[-1] if number > 4 else None))
        assert {worker.pid for worker in made.all} == {worker.pid for worker in kept}
        fds, threads, rss = zip(*seen[4:], strict=True)
        assert len(set(fds)) == 1 and len(set(threads)) == 1, seen
        assert rss[-1] - rss[len(rss) // 3] < 8 << 20, rss


def test_operations_that_are_cut_anywhere_fail_at_once(tmp_path: Path) -> None:
    """Gloo forgets an operation whose write fails; one round in ten ended so, at gloo's timeout."""
    with world(tmp_path, "busy") as made:
        made.holds_connections = True
        kept: list[Worker] = []
        for _ in range(30):
            made.begin(2, kept)
            made.resumed()
            kept = list(made.workers)
            made.end()


def test_a_connection_of_the_scripts_own_survives(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with world(tmp_path, "with_socket", steps=60, port=port) as made:
            workers = made.begin(2)
            made.resumed()
            connections = [server.accept()[0] for _ in workers]
            for one in workers:
                one.wait_line("step", step=3)
            made.end()
            made.begin(2, workers)
            finish(made)
            for connection in connections:
                with connection:
                    assert connection.recv(1) == b"a"
                    assert connection.recv(1) == b"b"


def test_a_collective_in_another_thread_and_group_is_cut_too(tmp_path: Path) -> None:
    with world(tmp_path, "in_thread", seconds=1.0) as made:
        workers = made.begin(3)
        made.resumed()
        time.sleep(0.3)
        made.end([workers[0]])


@pytest.mark.parametrize("where", ["half", "all"])
def test_two_groups_are_cut_and_made_again(tmp_path: Path, where: str) -> None:
    """A rank dies while others wait for it, some in one group and some in the other."""
    faults = [at(3, 4, where, "kill")]
    with world(tmp_path, "in_two_groups", steps=8, faults=faults) as made:
        *kept, lost = made.begin(4)
        assert lost.exit_code() == -signal.SIGKILL
        parked = made.end(kept)
        assert {one["step"] for one in parked} == {4}
        made.begin(3, kept, step=4)
        finish(made)
        for rank, worker in enumerate(kept):
            sums = {(row["round"], row["half"], row["all"]) for row in worker.lines("sums")}
            assert sums == {(0, 2, 4), (1, 2 - rank % 2, 3)}


def test_a_second_call_is_refused_in_words(tmp_path: Path) -> None:
    """A new worker begins with the first function, whichever the others are in."""
    with world(tmp_path, "twice") as made:
        for worker in made.begin(2):
            assert worker.exit_code() == 1
            assert worker.lines("first") and not worker.lines("second")
            assert "a function under @elastic was called a second time" in worker.text()


def test_a_value_that_cannot_be_sent_is_refused_in_the_first_round(tmp_path: Path) -> None:
    with world(tmp_path, "unsendable") as made:
        for worker in made.begin(2):
            assert worker.exit_code() == 1
            assert "CannotBroadcastError: state.score cannot be sent" in worker.text()
            assert not worker.lines("begin")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("model", "model.weight is [3, 4] float32 on rank 1, and [2, 4] float32 on rank 0"),
        ("sampler", "micro_batch=2, seed=0 on rank 1, and 9 samples, batch_size=None, global_"),
    ],
)
def test_states_that_differ_are_refused_before_anything_hangs(
    tmp_path: Path, entry: str, reason: str
) -> None:
    with world(tmp_path, "differing", entry=entry) as made:
        first, second = made.begin(2)
        assert (first.exit_code(), second.exit_code()) == (1, 1)
        assert reason in second.text()
        assert "MismatchError: the state of rank 1 differs" in first.text()


@pytest.mark.parametrize(
    ("function", "holder"),
    [
        ("with_old_wrapper", "by DistributedDataParallel"),
        ("with_old_group", "by Trainer"),
        ("with_old_mesh", ""),
    ],
)
def test_a_wrapper_or_group_of_a_former_round_is_refused(
    tmp_path: Path, function: str, holder: str
) -> None:
    with world(tmp_path, function) as made:
        (only,) = made.begin(1)
        only.wait_line("begin")
        only.send({"type": "round_over", "round": 0})
        assert only.exit_code() == 1
        assert "a process group of round 0, which is over, is still in use" in only.text()
        assert holder in only.text()


def test_the_end_of_a_round_passes_by_handlers_and_callbacks(tmp_path: Path) -> None:
    with world(tmp_path, "parking", seconds=0.2) as made:
        (only,) = made.begin(1)
        only.wait_line("begin")
        begun = time.monotonic()
        made.end()
        assert time.monotonic() - begun >= 0.2
        assert only.lines("on_park") == [
            {"what": "on_park", "pid": only.pid, "round": 0, "token": "test.round0"}
        ]
        out = tmp_path / "next.log"
        made.begin(1, [only], out=out)
        assert only.exit_code() == 0
        # Output in the next round goes to that round's files.
        assert '"env": "1"' in out.read_text() and "swallowed" not in only.text()


def test_loader_processes_of_a_killed_worker_hold_nobody_up(tmp_path: Path) -> None:
    with world(tmp_path, steps=8, workers=2, faults=[at(2, 4, "forward", "stop")]) as made:
        first, second, lost = made.begin(3)
        lost.wait_line("fault")
        # The loader processes of the killed rank live on for seconds; stopped, for as long as this
        # test wants.
        loaders = descendants(lost.pid)
        assert len(loaders) >= 2
        for pid in loaders:
            os.kill(pid, signal.SIGSTOP)
        lost.kill()
        try:
            for one in (first, second):
                assert "gloo" in one.expect("suspect")["message"]
        finally:
            for pid in loaders:
                os.kill(pid, signal.SIGKILL)
        made.end([first, second])
        made.begin(2, [first, second], step=4)
        finish(made)


def run_script(command: list[str], more: Mapping[str, str] = QUICK_TORCH) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RDZV_")}
    paths = [str(SUPPORT), str(ROOT / "worker"), os.environ["PYTHONPATH"]]
    env |= {"PYTHONPATH": os.pathsep.join(paths), **more}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = (
    "import os; os.environ.setdefault('RANK', '0'); import kept_training; kept_training.train(6)"
)


def test_the_same_script_runs_alone(tmp_path: Path) -> None:
    out = run_script([sys.executable, "-c", SCRIPT])
    assert '"what": "done"' in out


@pytest.mark.slow
def test_the_same_script_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert run_script([*command, str(script)]).count('"what": "done"') == 2


def test_new_ranks_hand_on_what_they_receive(tmp_path: Path) -> None:
    # A step later than 3, after which four ranks would have one sample each in the epoch's last.
    faults = [at(0, 4, "forward", "sleep", seconds=0.5)]
    with world(tmp_path, steps=9, faults=faults) as made:
        (only,) = made.begin(1)
        only.wait_line("fault")
        (parked,) = made.end()
        made.begin(4, [only], step=parked["step"])
        resumed = made.resumed()
        assert [one["healed"] for one in resumed] == [False, True, True, True]
        begun = [worker.wait_line("begin", round=1) for worker in made.workers]
        assert len({(one["step"], one["weights"]) for one in begun}) == 1
        assert begun[0]["step"] == parked["step"] >= 4
        assert [worker.exit_code() for worker in made.workers] == [0] * 4


def test_what_is_compiled_outlives_the_wrapper_of_a_round(tmp_path: Path) -> None:
    with world(tmp_path, "compiled") as made:
        times, kept = set(), list[Worker]()
        for number in range(3):
            for worker in made.begin(2, kept):
                worker.wait_line("compiled", round=number)
            times.add(made.workers[0].lines("compiled")[-1]["times"])
            made.workers[1].kill()
            kept = made.workers[:1]
            made.end(kept)
        assert times == {1}
