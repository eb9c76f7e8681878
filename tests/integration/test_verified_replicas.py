"""Replicas that are compared: which is named, and what the others then train on.

The replicas of `replicas` share this process, so many bits can be changed in seconds.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rdzv.worker import (
    MismatchError,
    OddReplicaError,
    ReplicasDifferError,
    State,
    UnsupportedError,
    verifying,
)
from rdzv.worker.healing import StateOffer
from rdzv.worker.session import Session
from rdzv.worker.verifying import Verifying
from tests.support.replicas import LeftError, Raised, Replicas, flip, plant

pytestmark = pytest.mark.slow
KINDS = {OddReplicaError: "odd", ReplicasDifferError: "differs", LeftError: "left", type(None): ""}


def kinds(raised: Raised) -> list[str]:
    return [KINDS[type(one)] for one in raised]


def test_flipped_bits_are_named_and_leave_no_trace_in_what_is_redone() -> None:
    torch.set_num_threads(1)
    chosen, disturbed, undisturbed = random.Random(7), Replicas(3, every=5), Replicas(3, every=1)
    named = 0
    for _ in range(40):
        rank, raised = plant(disturbed, chosen, every=5)
        if any(raised):
            assert kinds(raised).pop(rank) == "odd" and kinds(raised).count("left") == 2, raised
            named += 1
        else:  # A change of the last bits may be rounded away before it is looked for.
            disturbed = Replicas(3, every=5)
    assert named >= 38
    while undisturbed.at < disturbed.at:
        undisturbed.step()
        assert not any(undisturbed.commit())
    assert undisturbed.digests() == disturbed.digests()


def changed(replicas: Replicas, *ranks: int) -> Raised:
    """Commit a step with other changes on each of these ranks."""
    replicas.step()
    for rank in ranks:
        replicas.parameters(rank)[0][1].view(-1)[0] += 1 + rank
    return replicas.commit()


@pytest.mark.parametrize(
    ("count", "ranks", "raised", "text"),
    [
        (3, [1], ["left", "odd", "left"], "model.0.weight of rank 1 (n1, "),
        (5, [0, 3], ["odd", "left", "left", "odd", "left"], "computed wrongly"),
        (2, [0], ["left", "differs"], "Both nodes are suspected"),
        (3, [1, 2], ["left", "differs", "differs"], "No majority agrees, so no node is blamed"),
    ],
)
def test_only_those_that_differ_from_a_majority_are_odd(
    count: int, ranks: list[int], raised: list[str], text: str
) -> None:
    replicas = Replicas(count, every=2)
    assert not any(changed(replicas))
    found = changed(replicas, *ranks)
    assert kinds(found) == raised
    said = next(str(one) for one in found if not isinstance(one, LeftError))
    assert said.startswith("replica digest: after step 2, ")
    assert text in said and "all were equal at step 1" in said
    # All are back at the step that was verified, and hold no snapshot of a later one.
    assert [one.step for one in replicas.sealings] == replicas.cleared == [1] * count
    assert len(set(replicas.digests())) == 1


def test_what_was_never_equal_after_a_step_is_no_replica() -> None:
    replicas = Replicas(3, every=100)
    found = changed(replicas, 1)
    assert kinds(found) == ["left", "differs", "left"]
    assert "model.0.weight of rank 1" in str(found[1])
    assert "so they are no replicas: the script trains them differently" in str(found[1])


def test_a_rank_that_differs_on_two_nodes_at_the_same_step_is_the_scripts() -> None:
    replicas = Replicas(3, every=1)
    assert not any(changed(replicas))
    assert kinds(changed(replicas, 2)) == ["left", "left", "odd"]
    replicas.replace(2, by=0)
    again = changed(replicas, 2)
    assert kinds(again) == ["left", "left", "differs"]
    assert "So did it on n2 before: the script changes it" in str(again[2])
    # Once that step was redone, it is the node's again.
    replicas.replace(2, by=0)
    assert not any(changed(replicas))
    assert kinds(changed(replicas, 2)) == ["left", "left", "odd"]
    # The same machine again is no other node.
    replicas.hosts[2] = "the same"
    replicas.replace(2, by=0)
    assert not any(changed(replicas))
    assert kinds(changed(replicas, 2)) == ["left", "left", "odd"]
    replicas.replace(2, by=0)
    replicas.hosts[2] = replicas.hosts[2].removesuffix("+")
    assert kinds(changed(replicas, 2)) == ["left", "left", "odd"]


def test_a_replica_that_is_odd_as_a_round_begins_heals_nobody() -> None:
    replicas = Replicas(4, every=100)
    for _ in range(4):
        assert not any(changed(replicas))
    flip(replicas.parameters(0), random.Random(1))
    replicas.renew(3)
    found = replicas.begin_round()
    assert kinds(found) == ["odd", "left", "left", "left"]
    # The new one has not gone back: what its runner still holds may be needed.
    assert replicas.cleared == [1, 1, 1]
    assert "after step 4, model." in str(found[0]) and "equal at step 1" in str(found[0])


def test_a_step_whose_comparison_failed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(mine: str, size: int) -> list[str]:
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] closed")

    replicas = Replicas(3, every=2)
    assert not any(changed(replicas))
    verified = replicas.digests()
    monkeypatch.setattr(verifying, "gather", cut)
    replicas.step()
    sealing, one = replicas.sealings[1], replicas.verifyings[1]
    sealing.commit()
    with pytest.raises(RuntimeError, match="closed"):
        one.committed()
    assert (sealing.step, sealing.torn, sealing.has_gone_back) == (1, False, True)
    assert replicas.digests()[1] == verified[1]


def test_a_rank_without_a_copy_of_its_own_is_to_be_healed() -> None:
    (sealing, *_) = Replicas(2, every=1).sealings
    sealing.hold_verified(with_tensors=False)
    sealing.step, before = 3, sealing.image({}).parameters
    assert sealing.go_back() == 0
    assert sealing.torn and sealing.step is None
    assert all(torch.equal(one, before[name]) for name, one in sealing.image({}).parameters.items())


# ------------------------------------------------------------------ bad input


def test_ranks_that_verify_at_different_steps_are_told_before_they_wait() -> None:
    one: Any = Verifying(SimpleNamespace(), None, lambda: None, lambda _: None)  # type: ignore[arg-type]
    offers = [StateOffer(False, 0, False, "", "", verify_every=every) for every in (0, 10)]
    with pytest.raises(MismatchError, match="verify_every is 10 on rank 1, and None on rank 0"):
        one.compare(offers, None, None)


@pytest.mark.parametrize("every", [0, -1, True, 2.0])
def test_a_number_of_steps_that_is_none_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=f"verify_every is {every}; give 1 step or more, or None"):
        State(step=0, verify_every=every)


def test_the_parts_of_a_sharded_model_are_no_replicas() -> None:
    state = State(step=0, verify_every=10)
    session = Session(state, None, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"replicas of one part \(HSDP\) are not compared"):
        session.verifying.refuse_shards()
