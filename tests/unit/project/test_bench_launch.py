"""How bench/launch.py tells processes apart, and the contents of its section."""

import doctest
import os
from typing import Any

import bench_path  # noqa: F401
import launch
import pytest
import sections
from launch import Idle, Used, role_of
from measure import Spread


def start(contender: str, *seconds: float, faster: float | None) -> dict[str, Any]:
    return {
        "bench": "launch",
        "case": "start",
        "contender": contender,
        "workers": 2,
        "seconds": Spread.of(seconds).as_json(),
        "times_as_fast": faster,
    }


@pytest.mark.slow
def test_the_examples_hold() -> None:
    assert doctest.testmod(launch).failed == 0


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python3", "-I", "-S", "-X", "utf8", "/a/runner/__main__.py", "15"], "runner"),
        (["python3", "/a/store_host.py", "--fd", "6"], "store host"),
        (["rdzv zygote: torch, torch._dynamo"], "zygote"),
        (["python3", "-u", str(launch.WORKER)], "worker"),
        (["python3", "-c", "pass"], "other"),
        ([""], "other"),
    ],
)
def test_processes_are_told_apart_by_their_command_line(command: list[str], role: str) -> None:
    assert role_of(command, leader=False) == role


@pytest.mark.slow
def test_what_a_process_has_used_grows() -> None:
    before = Used.by(os.getpid())
    sum(range(1_000_000))
    assert Used.by(os.getpid()).cpu_s > before.cpu_s


def test_agent_and_runner_are_summed_up_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    roles = {
        "agent": Idle(1, 30_000_000, 40_000_000, 0.05, 1.0),
        "runner": Idle(1, 8_000_000, 12_000_000, 0.0, 0.0),
        "store host": Idle(1, 90_000_000, 150_000_000, 0.0, 0.0),
    }
    launch.say_idle("rdzvrun", roles, 25.0)
    told = capsys.readouterr().out.splitlines()
    assert "agent + runner" in told[0]
    assert "38.0 MB PSS" in told[0] and "52.0 MB RSS" in told[0]
    assert len([line for line in told if line.startswith("idle")]) == 4


def test_the_ratio_is_of_medians(capsys: pytest.CaptureFixture[str]) -> None:
    launch.say_starts({"torchrun": [2.0, 1.6, 9.0], "rdzvrun": [0.5, 0.4, 0.6]})
    assert "4 times as fast as torchrun" in capsys.readouterr().out


def test_the_section_has_both_tables() -> None:
    idle = {
        "bench": "launch",
        "case": "idle",
        "contender": "rdzvrun",
        "role": "worker",
        "seconds": 25.0,
        **Idle(2, 8_800_000, 20_500_000, 0.01, 0.5).as_json(),
    }
    section = sections.launch_section([start("rdzvrun", 0.4, 0.3, 0.5, faster=4.0), idle])
    assert "| rdzvrun | 2 | 3 | 0.4 | 0.3 | 0.5 | 4 |" in section
    assert "over 25 s" in section
    assert "| rdzvrun | worker (2) | 8.8 MB | 20.5 MB | 0.010 % | 0.5 |" in section


def test_without_torchrun_there_is_no_ratio() -> None:
    assert "| - |" in sections.launch_section([start("rdzvrun", 0.4, faster=None)])
