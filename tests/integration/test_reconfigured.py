"""Where torch can, a worker that stays keeps its default process group: the same object."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kept_workers import FakeLink, World, world

from rdzv.worker.groups import Options, RoundGroups, can_reconfigure
from rdzv.worker.rounds import round_of

pytestmark = [
    pytest.mark.current_torch,
    pytest.mark.skipif(not can_reconfigure("gloo"), reason="this torch reconfigures no groups"),
]


def groups_of(made: World) -> list[dict[str, Any]]:
    return [one.wait_line("group", round=made.number) for one in made.workers]


def test_the_default_group_outlives_lost_and_new_ranks(tmp_path: Path) -> None:
    with world(tmp_path, "with_default_group") as made:
        first, second, lost = made.begin(3)
        assert not any(one["is_same"] for one in groups_of(made))
        lost.kill()
        made.end([first, second])
        made.begin(2, [second, first])
        found = groups_of(made)
        assert [one["is_same"] for one in found] == [True, True]
        values = {(one["ranks"], one["last"], one["half"], *one["members"]) for one in found}
        assert values == {(1, 1, 1, 0, 1)}
        made.end()
        made.begin(4, [second, first])
        found = groups_of(made)
        assert [one["is_same"] for one in found] == [True, True, False, False]
        values = {(one["ranks"], one["last"], one["half"], *one["members"]) for one in found}
        assert values == {(6, 3, 2, 0, 1, 2, 3)}
        made.end()
        made.begin(1, [first])
        assert [one["is_same"] for one in groups_of(made)] == [True]


@pytest.mark.parametrize("operation", range(6))
def test_a_peer_that_dies_within_a_reconfigure_holds_nobody_up(
    tmp_path: Path, operation: int
) -> None:
    """It stops before one operation on the round's store, and is killed once others wait for it."""
    with world(tmp_path, steps=6) as made:
        kept = made.begin(2)
        kept[0].wait_line("step", step=2)
        made.end()
        made.begin(3, kept, stops_at=[2, operation, 1])
        new = made.workers[2]
        new.wait_line("stops")
        new.kill()
        made.end(kept)
        made.begin(3, kept, stops_at=None)
        assert [worker.exit_code() for worker in made.workers] == [0, 0, 0]


def documented() -> str:
    """Return the script of the documentation, with more steps, and marks to follow it by."""
    page = (Path(__file__).parents[2] / "docs" / "workers-that-stay.md").read_text()
    (text,) = (
        one for one in re.findall("```python\n(.*?)```", page, re.S) if "reconfigure(" in one
    )
    assert text.count("steps = None, 0, 200") == text.count("step += 1\n") == 1
    text = text.replace("200", "600")
    made = "model = DistributedDataParallel(net, init_sync=False)\n"
    assert text.count(made) == 1
    text = text.replace(made, f"mark(-1 - round.number); {made}")
    return text.replace("step += 1\n", "step += 1; mark(step)\n")


def test_the_documented_script_survives_lost_and_new_ranks(tmp_path: Path) -> None:
    with world(tmp_path, "script", text=documented()) as made:
        first, second, lost = made.begin(3)
        lost.wait_line("mark", step=100)
        lost.kill()
        parked = made.end([first, second])
        made.begin(2, [first, second], step=max(one["step"] for one in parked))
        resumed = made.resumed()
        assert [one["step"] for one in resumed] == [max(one["step"] for one in parked)] * 2
        first.wait_line("mark", step=300)
        parked = made.end()
        made.begin(3, [second, first], step=max(one["step"] for one in parked))
        assert [worker.exit_code() for worker in made.workers] == [0, 0, 0]
        wrapped = [-1 - row["step"] for row in first.lines("mark") if row["step"] < 0]
        assert wrapped == [0, 1, 2]
        last = {worker.text().splitlines()[-1] for worker in made.workers}
        assert len(last) == 1 and last.pop().startswith("step 600, bias ")


SAYS_OWN = """
from rdzv.worker import reconfigure
round = reconfigure()
mark(round.world_size)
try:
    reconfigure()
except RuntimeError as error:
    print(error)
reconfigure(ValueError("the script's own"), step=1)
"""


def test_an_error_of_the_scripts_own_is_raised_again(tmp_path: Path) -> None:
    with world(tmp_path, "script", text=SAYS_OWN) as made:
        (only,) = made.begin(1)
        assert only.exit_code() == 1
        assert "reconfigure() was called again without an exception" in only.text()
        assert only.text().endswith("ValueError: the script's own\n")


KEEPS_WRAPPERS = """
import torch
import torch.distributed as dist
from rdzv.worker import StaleGroupError, reconfigure
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

net, error, old = torch.nn.Linear(8, 1), None, []
while True:
    round = reconfigure(error, step=1)
    try:
        for parameter in net.parameters():
            dist.broadcast(parameter.data, round.source)
        for wrapper in old:
            try:
                wrapper(torch.ones(1, 8))
            except StaleGroupError as refused:
                print(refused)
        model = DistributedDataParallel(net, init_sync=False)
        net.zero_grad()
        model(torch.full((1, 8), 1.0 + round.rank)).sum().backward()
        sharded = torch.nn.Linear(8, 2)
        fully_shard(sharded)
        sharded(torch.ones(1, 8)).sum().backward()
        old += [model, sharded]
        model(torch.ones(1, 8))  # Its backward pass never comes.
        mark([round.number, *net.weight.grad[0, :2].tolist()])
        while True:
            dist.all_reduce(torch.ones(1))
    except Exception as failure:
        error = failure
"""


def test_a_wrapper_of_an_earlier_round_is_refused_and_takes_no_part_in_the_next(
    tmp_path: Path,
) -> None:
    """Beside a new rank, whose own would wait for it; and with as many ranks as before."""
    with world(tmp_path, "script", text=KEEPS_WRAPPERS) as made:
        made.holds_connections = True  # All ranks are cut within a collective.
        kept: list[Any] = []
        for number in range(3):
            for worker in made.begin(2, kept, step=1):
                # The mean of what the two ranks have computed.
                worker.wait_line("mark", step=[number, 1.5, 1.5])
            if number == 0:
                made.workers[1].kill()
                kept = made.workers[:1]
            else:
                kept = made.workers
            made.end(kept)
        text = kept[0].text()
        for number, times in ((0, 4), (1, 2)):
            assert text.count(f"a wrapper of round {number} (DistributedDataP") == times


def test_torchs_own_example_holds() -> None:
    """Of the docstring of `_reconfigure`, with the rendezvous of a rank that is alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, enable_reconfigure=True)
    try:
        for uuid in (1, 2):
            handles = [dist._get_reconfigure_handle()]
            dist._reconfigure(uuid=uuid, handles=handles).wait()
            assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_refused_a_round_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Here for a uuid that was used before: a store that serves a round again."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    link: Any = FakeLink()

    def opened(number: int, former: RoundGroups | None) -> RoundGroups:
        round_ = round_of({"RANK": "0", "WORLD_SIZE": "1", "RDZV_ROUND": str(number)})
        groups = RoundGroups(round_, Options("gloo"), link, former)
        known = 0
        try:
            groups.open()
            known = len(groups.gloo.own)  # type: ignore[union-attr]
        finally:
            groups.close(keep=True)
        # The next cut does not knock at the address of the parked group, which would keep the call.
        assert len(groups.gloo.own) == known  # type: ignore[union-attr]
        return groups

    former = opened(0, None)
    kept = dist.group.WORLD
    assert dist.is_initialized()
    former = opened(1, former)
    assert dist.group.WORLD is kept
    with pytest.raises(RuntimeError, match="uuid 4294967296 was already used"):
        opened(1, former)
    assert not dist.is_initialized()
    last = opened(2, former)
    assert dist.group.WORLD is not kept and dist.is_initialized()
    monkeypatch.setattr(last.store, "enter", lambda *_: 1 / 0)
    last.close(keep=True)
    assert not dist.is_initialized()
    assert "rank 0: warning: the process group is made anew: division by zero" in (
        capfd.readouterr().err
    )
