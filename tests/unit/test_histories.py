"""Random histories: whatever goes wrong, no promise is broken; and once nothing does, it trains.

Each history is one number. `python -m tests.unit.test_histories 4711 --trace` prints that one as
a scenario; `python -m tests.unit.test_histories --seeds 0:100000` runs many.
"""

from __future__ import annotations

import argparse

import pytest

from tests.scenarios.interpreter import Stage
from tests.scenarios.language import write_command, write_settings, write_state
from tests.unit.builders import SETTINGS, BrokenPromiseError
from tests.unit.world import World

HISTORIES = 200
CHUNK = 100
TROUBLES = 40
"""How many things go wrong, or right, in one history."""
PATIENCE_MS = 180_000
"""Within this time of the last trouble a round runs: grace, lease, deadlines and last call."""


def live(world: World) -> None:
    """Live one history to its end.

    Raises:
        BrokenPromiseError: as told by its message.
    """
    world.trouble(TROUBLES)
    world.heal()
    deadline_ms = world.now_ms + PATIENCE_MS
    while not world.well:
        if world.now_ms > deadline_ms:
            raise BrokenPromiseError("liveness: nobody is in trouble, and no round runs")
        world.run(world.now_ms + 1_000)


def judge(seed: int) -> None:
    world = World(seed)
    try:
        live(world)
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("first", range(0, HISTORIES, CHUNK))
def test_no_history_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + CHUNK):
        judge(seed)


def test_a_seed_is_a_history() -> None:
    one, other = World(4711), World(4711)
    live(one)
    live(other)
    assert one.trace == other.trace


@pytest.mark.parametrize("seed", range(20))
def test_a_history_prints_itself_as_a_scenario(seed: int) -> None:
    world = World(seed)
    live(world)
    stage = Stage()
    stage.run(as_scenario(world).splitlines())
    assert write_state(stage.job.state) == write_state(world.server.state)


# ------------------------------------------------------------------ by hand


def as_scenario(world: World) -> str:
    """Write what was said to the rendezvous as a scenario file without its answers."""
    incarnations = sorted({getattr(c, "incarnation", 1) for _, c in world.trace})
    names = {incarnation: number + 1 for number, incarnation in enumerate(incarnations)}
    settings = world.swarm.settings
    lines = ["new job-7 " + " ".join(write_settings(settings, SETTINGS))]
    for at_ms, command in world.trace:
        if isinstance(command, str):
            text = command
        else:
            number = names.get(getattr(command, "incarnation", 1), 1)
            speaker = f"{getattr(command, 'node_id', '')}#{number}"
            text = write_command(command, settings, at_ms, speaker)
        lines.append(f"at {at_ms}ms  {text}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", default="0:1000", help="first:last")
    parser.add_argument("--trace", action="store_true", help="print it as a scenario")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition(":")
    seeds = range(int(first), int(last)) if arguments.seed is None else [arguments.seed]
    failed = 0
    for seed in seeds:
        world = World(seed)
        try:
            live(world)
        except BrokenPromiseError as error:
            failed += 1
            print(f"seed {seed}: {str(error)[:300]}")
        if arguments.trace:
            print(f"# Seed {seed}: {world.swarm.settings}")
            print(as_scenario(world))
    print(f"{len(seeds)} histories, {failed} broken")
    raise SystemExit(3 if failed else 0)


if __name__ == "__main__":
    main()
