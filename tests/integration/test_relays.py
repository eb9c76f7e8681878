"""Real relays: a training does not notice that one dies, nor that the server behind it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from forked_programs import Forked
from ports import free_port
from test_invisible_server import Training


@pytest.fixture
def c(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path) as made:
        yield made


def start_relay(c: Cluster) -> tuple[str, Forked]:
    at = f"127.0.0.1:{free_port()}"
    relay = c.start_rdzvd("--relay", c.endpoint, "--listen", at)
    assert relay.stdout is not None
    assert relay.stdout.readline() == f"rdzvd ready: listening on {at}, relaying to {c.endpoint}\n"
    return at, relay


@pytest.mark.slow
def test_a_relay_dies_and_then_the_server(c: Cluster) -> None:
    (first, relay), (second, other) = start_relay(c), start_relay(c)
    training = Training(c, lambda node: (f"--rdzv-endpoint={first},{second}",))
    training.wait_for_steps(20)
    relay.kill()
    # On a busy machine a node may have gone to the other one at once.
    c.wait_for_log("its call has ended")
    training.wait_until_seated()
    training.check_undisturbed()
    c.kill_server()
    c.start_server()
    training.wait_until_seated()
    training.check_undisturbed()
    training.finish()
    for one in (relay, other):
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()
