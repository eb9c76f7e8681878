"""New processes and the snapshots available to them: which are used, and which are not."""

from __future__ import annotations

import errno
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rdzv.worker import healing, notice, shards
from rdzv.worker.link import Announced, GivenSlots
from rdzv.worker.resuming import Resuming
from rdzv.worker.rounds import Round
from rdzv.worker.sealing import Sealing
from rdzv.worker.shards import Parts, Place
from rdzv.worker.slot_format import NO_MARK, TENSORS_AT, Mark
from rdzv.worker.snapshots import Snapshots
from rdzv.worker.staging import copy_all
from rdzv.worker.verifying import Verifying

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[2] / "support"


def step_of(what: dict[str, Any]) -> int | None:
    """The step of a snapshot as the runner hears of it; None of an empty slot."""
    return what["mark"]["step"] if what else None


class Runner:
    """The runner's end of the links: slots that outlive the processes."""

    def __init__(self) -> None:
        self.announced = Announced()
        self.fds: list[int] = []
        self.size = 0
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.refuses = ""
        self.copies: list[int] = []

    def keep_copies_of(self, other: Runner) -> None:
        """Have what the other one holds, as its carrier brings it."""
        self.copies = [os.memfd_create(f"copy {n}") for n in range(2)]
        for fd, of in zip(self.copies, other.fds, strict=True):
            os.write(fd, os.pread(of, other.size, 0))

    def reserve(self, size: int, *, copies: bool = False) -> GivenSlots:
        given = [os.dup(fd) for fd in self.copies] if copies else []
        if self.refuses or (not size and not self.fds):
            return GivenSlots(0, [], self.refuses or "no snapshot is held", given)
        if size > self.size:
            self.close()
            self.fds, self.size = [os.memfd_create(f"slot {n}") for n in range(2)], size
            for fd in self.fds:
                os.ftruncate(fd, size)
        return GivenSlots(self.size, [os.dup(fd) for fd in self.fds], copies=given)

    def saved(self, slot: int, **what: Any) -> None:
        self.said.append((slot, what))

    def wait_until_whole(self, mark: Mark, timeout_s: float) -> bool:
        self.announced.whole = mark
        return True

    def flip(self, step: int, place: int = TENSORS_AT + 3) -> None:
        """Flip a bit in the slot that holds this step."""
        (slot,) = [slot for slot, what in self.said if step_of(what) == step]
        octet = os.pread(self.fds[slot], 1, place)[0]
        os.pwrite(self.fds[slot], bytes([octet ^ 4]), place)

    def close(self) -> None:
        for fd in (*self.fds, *self.copies):
            os.close(fd)
        self.fds, self.copies = [], []


@pytest.fixture
def runners() -> Any:
    made = [Runner(), Runner()]
    yield made
    for runner in made:
        runner.close()


def sealing_of(width: int = 3, nonce: str = "as all ranks have") -> Sealing:
    """Create a state as a new process has it."""
    torch.manual_seed(1)
    model = nn.Linear(4, width)
    optimizer = torch.optim.AdamW(model.parameters())
    sealing = Sealing({"model": model, "optimizer": optimizer, "step": 0})
    sealing.nonce = nonce
    return sealing


def round_of(number: int, rank: int, size: int = 2) -> Round:
    return Round(number, rank, size, local_rank=0, restarts=0, token="")


def train(
    runner: Runner, steps: int, rank: int = 0, size: int = 2, every: int = 1, **how: Any
) -> Sealing:
    """Train on one node and save; return the last step."""
    sealing = sealing_of(**how)
    sealing.begin_round(rank, size, lambda: None)
    snapshots = Snapshots(sealing, runner, every)  # type: ignore[arg-type]
    snapshots.begin_round(round_of(0, rank, size))
    optimizer = sealing.contents.optimizers["optimizer"]
    for step in range(steps):
        sealing.contents.modules["model"](torch.ones(2, 4) * step).sum().backward()
        optimizer.step()
        sealing.contents.values["step"] += 1
        sealing.commit()
        snapshots.committed()
    snapshots.finish()
    return sealing


def resume(
    runners: Sequence[Runner], number: int = 1, **how: Any
) -> tuple[list[Sealing], list[bool]]:
    """Start a process on each node; return the steps they resumed from."""
    from torch._C._distributed_c10d import HashStore

    store, found = HashStore(), [False] * len(runners)
    sealings = [sealing_of(**how) for _ in runners]

    def one(rank: int) -> None:
        snapshots = Snapshots(sealings[rank], runners[rank], None)  # type: ignore[arg-type]
        round_ = round_of(number, rank, len(runners))
        found[rank] = Resuming(snapshots.held, sealings[rank], round_).load(store)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(runners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return sealings, found


def bits(sealing: Sealing) -> list[bytes]:
    return [one.numpy().tobytes() for _, one in sealing.image({}).tensors()]


def test_no_thread_is_left_as_the_process_exits(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that frees a tensor while the interpreter ends aborts the process."""
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    goes_on = threading.Event()

    def copy_slowly(*words: Any) -> None:
        assert goes_on.wait(60)
        copy_all(*words)

    monkeypatch.setattr("rdzv.worker.snapshots.copy_all", copy_slowly)
    _, snapshots = saving(runners[0])
    assert snapshots.save()
    assert snapshots.finish in at_exit
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(snapshots.finish)
        assert not ended.done()
        goes_on.set()
        assert ended.result(60)
    assert steps(runners[0]) == [1]


def test_nothing_is_saved_beside_a_copy_that_does_not_end(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr("rdzv.worker.snapshots.copy_all", lambda *_: goes_on.wait(60))
    monkeypatch.setattr("rdzv.worker.snapshots.FINISH_TIMEOUT_S", 0.01)
    _, snapshots = saving(runners[0])
    assert [snapshots.save() for _ in range(3)] == [True, False, False]
    assert capsys.readouterr().err.count("skipping saves: the last one takes longer than") == 1
    goes_on.set()


def test_new_processes_come_to_the_last_step(runners: list[Runner]) -> None:
    last = [train(runner, 3, rank) for rank, runner in enumerate(runners)]
    new, found = resume(runners)
    assert found == [True, True]
    assert [one.step for one in new] == [3, 3]
    assert [one.contents.values["step"] for one in new] == [3, 3]
    assert bits(new[0]) == bits(last[0]) != bits(sealing_of())


def heal(
    sealings: Sequence[Sealing],
    runners: Sequence[Runner],
    monkeypatch: pytest.MonkeyPatch,
    number: int = 1,
) -> list[healing.Healed]:
    """Heal two ranks in threads; RANK 0 is the source."""
    from torch._C._distributed_c10d import HashStore

    store, sent, here = HashStore(), queue.Queue[list[torch.Tensor]](), threading.local()

    def relay(tensors: list[torch.Tensor], before: int | None, after: int | None) -> None:
        if before is None:
            sent.put([one.clone() for one in tensors])
        else:
            for one, came in zip(tensors, sent.get(timeout=60), strict=True):
                one.copy_(came)

    monkeypatch.setattr(healing, "relay", relay)

    def one(rank: int) -> healing.Healed:
        here.rank = rank
        snapshots = Snapshots(sealings[rank], runners[rank], None)  # type: ignore[arg-type]
        round_ = round_of(number, rank)
        resuming = partial(Resuming, snapshots.held, sealings[rank], round_)
        verifying = Verifying(sealings[rank], None, lambda: None, lambda _: pytest.fail("differs"))
        hashed = healing.prepare(sealings[rank])
        return healing.heal(sealings[rank], hashed, round_, store, None, resuming, verifying)

    with ThreadPoolExecutor() as ranks:
        return list(ranks.map(one, range(2), timeout=60))


@pytest.mark.parametrize("other", ["new", "kept", "a step behind"])
def test_a_healed_rank_continues_the_lineage_of_its_source(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Else its snapshots would not fit those of the others, and no step would be whole again."""
    source, healed = sealing_of(nonce="theirs"), sealing_of(nonce="mine")
    source.lineage = 3
    for one in (source, healed)[: 1 if other == "new" else 2]:
        one.begin_round(0, 2, lambda: None)
        one.commit()
    if other == "a step behind":
        source.commit()
    step = source.step
    for number in (5, 6):  # In the next round, nobody needs to be healed.
        found = heal([source, healed], runners, monkeypatch, number)
        assert [(one.source, one.step) for one in found] == [(0, step)] * 2
        assert [(one.lineage, one.nonce) for one in (source, healed)] == [(3, "theirs")] * 2
        healed.begin_round(1, 2, lambda: None)
    assert [one.received for one in found] == [False, False]


def test_new_ranks_begin_a_lineage_together(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    sealings = [sealing_of(nonce="first"), sealing_of(nonce="second")]
    heal(sealings, runners, monkeypatch, 4)
    assert [(one.lineage, one.nonce) for one in sealings] == [(4, "first")] * 2


def test_a_rank_without_a_snapshot_gets_what_another_has_loaded(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when both workers are killed while only one has saved."""
    last = train(runners[0], 3)
    sealings = [sealing_of(), sealing_of()]
    healed = heal(sealings, runners, monkeypatch)
    assert [(one.source, one.step, one.received) for one in healed] == [(0, 3, False), (0, 3, True)]
    assert bits(sealings[1]) == bits(sealings[0]) == bits(last)


def sharded(rank: int, entry: str = "part") -> tuple[Sealing, Parts]:
    """A state as a rank of two has it: all of one module, and a part of another."""
    torch.manual_seed(rank)
    sealing, part = sealing_of(), nn.Linear(4, 2)
    with pytest.MonkeyPatch.context() as patched:
        # Sharding it would need a group of two processes.
        patched.setattr(shards, "place_of", lambda *_: Place(rank, 2))
        return sealing, Parts({entry: part}, rank, 2)


def save_part(runner: Runner, rank: int, steps: int, *, redone_in: int | None = None) -> None:
    """Save a few steps of a sharded state; each fills a part with its number, and that of RANK.

    The last of them is repeated, with another result, in the round `redone_in`.
    """
    sealing, parts = sharded(rank)
    sealing.begin_round(rank, 2, lambda: None)
    sealing.add(parts, holds_last=False)
    snapshots = Snapshots(sealing, runner, 1)  # type: ignore[arg-type]
    snapshots.begin_round(round_of(0, rank))
    for _ in range(steps):
        with torch.no_grad():
            parts.modules["part"].weight.fill_(10 * rank + (sealing.step or 0) + 1)
        sealing.commit()
        snapshots.committed()
        snapshots.finish()
    if redone_in is not None:
        sealing.step = steps - 1
        snapshots.begin_round(round_of(redone_in, rank))
        with torch.no_grad():
            parts.modules["part"].weight.fill_(-1)
        sealing.commit()
        snapshots.committed()
        snapshots.finish()


def test_parts_of_a_step_that_was_redone_are_not_put_beside_those_of_the_first_time(
    runners: list[Runner],
) -> None:
    """Its node was left out of the round that repeated the step, and then came back."""
    left_out, other = runners
    save_part(left_out, 0, 3), save_part(other, 1, 3, redone_in=1)
    sealings, found = resume(runners, number=3)
    assert found == [True, True]
    assert [one.step for one in sealings] == [2, 2]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_part_is_read_from_its_copy_if_nobody_else_has_it(
    runners: list[Runner], damaged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node of part 1 is lost, and the one of part 0 has kept a copy."""
    here, lost = runners
    save_part(here, 0, 3), save_part(lost, 1, 3)
    here.keep_copies_of(lost)
    lost.close()
    if damaged:
        (slot,) = [slot for slot, what in lost.said if step_of(what) == 3]
        octet = os.pread(here.copies[slot], 1, TENSORS_AT + 3)[0]
        os.pwrite(here.copies[slot], bytes([octet ^ 1]), TENSORS_AT + 3)
    sealings, found = resume(runners)
    step = 2 if damaged else 3
    assert found == [True, True]
    assert sorted(sealings[0].shards.all_held(step)) == [Place(0, 2), Place(1, 2)]
    assert sealings[1].shards.all_held(step) == {}
    image = sealings[0].shards.all_held(step)[Place(1, 2)]
    assert any(torch.equal(one, torch.full((2, 4), 10.0 + step)) for _, one in image.tensors())
    said = capsys.readouterr().err
    assert f"resumed from the snapshot of step {step} in memory (copies of parts 1)" in said
    assert ("step 3 in memory is damaged, so it is ignored" in said) == damaged


def test_a_copy_is_not_read_if_its_saver_is_there(runners: list[Runner]) -> None:
    here, there = runners
    save_part(here, 0, 2), save_part(there, 1, 2)
    here.keep_copies_of(there)
    sealings, found = resume(runners)
    assert found == [True, True]
    assert [sorted(one.shards.all_held(2)) for one in sealings] == [[Place(0, 2)], [Place(1, 2)]]


@pytest.mark.parametrize(
    ("damaged", "step"),
    [
        # On one node: the other node's snapshot is used, and heals this one.
        ([(0, 3)], [None, 3]),
        # On both: both continue from the step before.
        ([(0, 3), (1, 3)], [2, 2]),
        # Only the script's own file is left.
        ([(0, 2), (0, 3), (1, 2), (1, 3)], [None, None]),
    ],
)
@pytest.mark.parametrize(
    ("place", "what"),
    [
        (0, "a snapshot in memory is damaged in its header"),
        (60, "a snapshot in memory is damaged in its header"),
        (TENSORS_AT + 3, "the snapshot of step {} in memory is damaged"),
    ],
)
def test_a_damaged_snapshot_is_not_used_and_that_is_said(
    runners: list[Runner],
    damaged: list[tuple[int, int]],
    step: list[int | None],
    place: int,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank, runner in enumerate(runners):
        train(runner, 3, rank)
    for rank, of in damaged:
        runners[rank].flip(of, place)
    monkeypatch.setenv("RDZV_SNAPSHOT", "0:3:series")
    new, found = resume(runners)
    assert [one.step for one in new] == step
    assert found == [any(step)] * 2
    said = capsys.readouterr().err
    for rank, of in damaged:
        assert f"rank {rank}: warning: {what.format(of)}, so it is ignored" in said
    # What was announced is not loaded: one rank says so, and what is loaded instead.
    announced = (
        "rank 0: warning: the snapshot of step 3 in memory was to be loaded, but is not whole"
    )
    assert said.count(announced) == (3 not in step)
    assert ("; training resumes from step 2\n" in said) == (2 in step)
    assert ("; nothing is loaded: the script starts" in said) == (not any(step))
    untouched = [bits(one) for one, of in zip(new, step, strict=True) if of is None]
    assert all(one == bits(sealing_of()) for one in untouched)
    # It is not taken for a snapshot again.
    for rank, of in damaged:
        slot = next(slot for slot, what in runners[rank].said if step_of(what) == of)
        assert (slot, {}) in runners[rank].said[-2:]


def test_a_snapshot_of_another_state_is_refused_in_words(
    runners: list[Runner], capsys: pytest.CaptureFixture[str]
) -> None:
    train(runners[0], 3)
    new, found = resume(runners, width=5)
    assert found == [False, False] and new[0].step is None
    refused = "its state has other names, sizes or types"
    said = capsys.readouterr().err
    assert (
        f"rank 0: warning: cannot resume from the snapshot of step 3 in memory: {refused}" in said
    )


def test_parts_that_another_number_of_ranks_has_saved_are_loaded(runners: list[Runner]) -> None:
    here, lost = runners
    save_part(here, 0, 3), save_part(lost, 1, 3)
    assert resume([here])[1] == [False]
    here.keep_copies_of(lost)
    (new,), found = resume([here])
    assert found == [True] and new.step == 3
    assert sorted(new.shards.all_held(3)) == [Place(0, 2), Place(1, 2)]


@pytest.mark.parametrize(
    ("newest", "origin", "damaged", "step"),
    [
        ("0:2:series", None, False, 2),
        ("0:2:series", "0", True, 1),
        ("0:9:series", None, False, 3),
        ("1:1:series", None, False, 3),
        ("1:1:series", "1", False, None),
        ("", None, False, None),
    ],
)
def test_the_round_says_which_snapshots_may_be_used(
    runners: list[Runner],
    newest: str,
    origin: str | None,
    damaged: bool,
    step: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train(runners[0], 2 if damaged else 3)
    if damaged:
        runners[0].flip(2)
    monkeypatch.setenv("RDZV_SNAPSHOT", newest)
    if origin is not None:
        monkeypatch.setenv("RDZV_SNAPSHOT_ORIGIN", origin)
    assert [one.step for one in resume(runners)[0]] == [step, None]


def test_without_memory_training_goes_on_and_that_is_said_once(
    runners: list[Runner], capsys: pytest.CaptureFixture[str]
) -> None:
    runners[0].refuses = "two slots need 8.0 GB, but only 1.0 GB of memory are free"
    assert train(runners[0], 5).step == 5
    said = capsys.readouterr().err
    assert said == f"rdzv: rank 0: warning: cannot save snapshots: {runners[0].refuses}\n"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.ENOMEM, "Cannot allocate memory"),
        # A limit on the size of files, which counts for this memory as well.
        (errno.EFBIG, "File too large"),
    ],
)
def test_memory_that_the_kernel_refuses_is_said_and_training_goes_on(
    runners: list[Runner],
    number: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.posix_fallocate", refuse)
    assert train(runners[0], 5).step == 5
    said = capsys.readouterr().err
    assert (
        said == f"rdzv: rank 0: warning: cannot save snapshots: cannot map their memory: {reason}\n"
    )


def saving(runner: Runner, width: int = 3) -> tuple[Sealing, Snapshots]:
    """Train one step with memory for snapshots, of which none is saved yet."""
    sealing = sealing_of(width)
    sealing.begin_round(0, 2, lambda: None)
    snapshots = Snapshots(sealing, runner, None)  # type: ignore[arg-type]
    snapshots.begin_round(round_of(0, 0))
    sealing.commit()
    return sealing, snapshots


def steps(runner: Runner) -> list[int]:
    return [step for _, what in runner.said if (step := step_of(what))]


def test_a_script_may_save_before_any_memory_was_asked_for(runners: list[Runner]) -> None:
    _, snapshots = saving(runners[0])
    assert snapshots.save()
    snapshots.finish()
    assert steps(runners[0]) == [1]


def test_what_was_refused_is_not_asked_for_again_in_this_round(runners: list[Runner]) -> None:
    runners[0].refuses = "no memory is free"
    _, snapshots = saving(runners[0])
    assert snapshots.save()
    snapshots.finish()
    assert not snapshots.save()
    runners[0].refuses = ""
    assert not snapshots.save()
    snapshots.begin_round(round_of(1, 0))
    assert snapshots.save()
    snapshots.finish()
    assert steps(runners[0]) == [1]


def test_a_larger_slot_that_was_refused_is_asked_for_again_in_the_next_round(
    runners: list[Runner],
) -> None:
    _, snapshots = saving(runners[0])
    snapshots.save()
    snapshots.finish()
    held, larger = snapshots.held, 10 * runners[0].size
    assert held is not None
    runners[0].refuses = "no memory is free"
    assert not held.ask(larger)
    runners[0].refuses = ""
    assert not held.ask(larger)
    snapshots.begin_round(round_of(1, 0))
    assert held.ask(larger) and held.size == larger


def test_steps_that_were_given_up_may_become_whole_in_the_next_round(
    runners: list[Runner],
) -> None:
    _, snapshots = saving(runners[0])
    runners[0].announced = Announced(Mark(0, 20, "s"), Mark(0, 30, "s"))
    snapshots.begin_round(round_of(1, 0))
    assert runners[0].announced == Announced(Mark(0, 20, "s"), NO_MARK)


def test_a_part_that_comes_in_a_later_round_is_described(runners: list[Runner]) -> None:
    sealing, parts = sharded(0)
    sealing.begin_round(0, 2, lambda: None)
    snapshots = Snapshots(sealing, runners[0], None)  # type: ignore[arg-type]

    def described() -> set[bool]:
        sealing.commit()
        assert snapshots.save()
        snapshots.finish()
        assert snapshots.held is not None
        headers = [slot.header() for slot in snapshots.held.slots]
        newest = max((one for one in headers if one), key=lambda one: one.step)
        return {bool(newest.part)}

    snapshots.begin_round(round_of(0, 0))
    assert described() == {False}
    snapshots.begin_round(round_of(1, 0))
    sealing.add(parts, holds_last=False)
    assert described() == {True}


def test_a_step_changes_nothing_until_the_one_before_is_copied(
    runners: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the snapshot would mix two steps."""
    begun, stepped, early = threading.Event(), threading.Event(), []

    def copy_slowly(*words: Any) -> None:
        begun.set()
        early.append(stepped.wait(0.5))
        copy_all(*words)

    monkeypatch.setattr("rdzv.worker.snapshots.copy_all", copy_slowly)
    sealing, snapshots = saving(runners[0], width=1000)
    snapshots.save()
    assert begun.wait(60)
    sealing.contents.modules["model"](torch.ones(2, 4)).sum().backward()
    sealing.contents.optimizers["optimizer"].step()
    stepped.set()
    snapshots.finish()
    assert early == [False]
    (said,) = [what for _, what in runners[0].said if what]
    assert 300_000 < said["stopped_us"] < 60_000_000  # It waited for the copy, half a second.


def test_saves_that_are_left_out_are_said_once(
    runners: list[Runner], capsys: pytest.CaptureFixture[str]
) -> None:
    """No other rank has saved anything, so that no step is whole."""
    runners[0].announced.whole = Mark(0, 0)
    train(runners[0], 5)
    assert set(steps(runners[0])) == {1, 2}
    said = capsys.readouterr().err
    assert said.count("rank 0: warning: skipping saves while both snapshots in memory are ") == 1


@pytest.mark.parametrize("is_in_step", [False, True])
def test_a_save_that_was_left_out_is_made_before_a_node_leaves(
    runners: list[Runner], is_in_step: bool
) -> None:
    """Unless an optimizer has begun to change the state."""
    sealing, snapshots = saving(runners[0])
    runners[0].announced.whole = Mark(0, 0)
    for _ in range(3):
        snapshots.save()
        sealing.commit()
    snapshots.save()
    snapshots.finish()
    assert steps(runners[0]) == [1, 2]
    sealing.torn = is_in_step
    (leave,) = notice.before_leaving
    leave()
    assert steps(runners[0]) == ([1, 2] if is_in_step else [1, 2, 4])
    leave()
    assert len(steps(runners[0])) == (2 if is_in_step else 3)


@pytest.mark.parametrize("killed", ["writers", "copies"])
def test_what_a_killed_process_leaves_is_whole(killed: str) -> None:
    folders = ("worker", "agent", "rendezvous")
    paths = os.pathsep.join(str(Path(__file__).parents[3] / name) for name in folders)
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, SUPPORT / "killed_snapshots.py", killed, "20"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "none torn" in done.stdout, done.stderr


def test_a_step_that_was_done_again_is_no_redo_once_it_is_sealed() -> None:
    sealing = sealing_of()
    sealing.begin_round(0, 1, lambda: None)
    sealing.is_redo = True
    sealing.commit()
    assert not sealing.is_redo


def test_tensors_are_sent_together_if_they_have_the_same_type() -> None:
    """Joined with others, integers would be sent as floating-point numbers, and lose bits."""
    one, other = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    sent = list(healing.buckets_of([one, one, other, one]))
    assert [[tensor.dtype for tensor in bucket] for bucket in sent] == [
        [torch.float32, torch.float32],
        [torch.int64],
        [torch.float32],
    ]
