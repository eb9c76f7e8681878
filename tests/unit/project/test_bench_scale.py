"""The parts of bench/scale.py that need few nodes, and the child processes it uses."""

from pathlib import Path

import bench_path  # noqa: F401
import processes
import profiling
import pytest
import scale

ECHO = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    time.sleep(asked.get("sleep", 0))
    if "exit" in asked:
        sys.exit(asked["exit"])
    print(json.dumps(asked), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    return program


def test_joins_go_through_the_core_with_and_without_invariants() -> None:
    commands = scale.joins(50)
    assert scale.through_core(commands, checked=False) >= 0
    assert scale.through_core(commands, checked=True) >= 0


def test_a_core_that_has_not_all_joins_completes_nothing() -> None:
    with pytest.raises(AssertionError, match="the last join"):
        scale.through_core(scale.joins(3)[:-1], checked=False)


@pytest.mark.slow
def test_a_child_answers_each_question(echo: Path) -> None:
    with processes.Asked.running(echo) as child:
        assert child.ask(10, act="one") == {"act": "one"}
        assert child.ask(10, act="two") == {"act": "two"}


@pytest.mark.slow
def test_a_child_that_does_not_answer_in_time(echo: Path) -> None:
    with (
        processes.Asked.running(echo) as child,
        pytest.raises(TimeoutError, match=r"no answer of echo.py within 0.2 s"),
    ):
        child.ask(0.2, sleep=30)


@pytest.mark.slow
def test_a_child_that_ends(echo: Path) -> None:
    with (
        processes.Asked.running(echo) as child,
        pytest.raises(RuntimeError, match=r"echo.py has ended"),
    ):
        child.ask(10, exit=3)


@pytest.mark.slow
def test_a_child_that_says_that_it_has_failed(echo: Path) -> None:
    with processes.Asked.running(echo) as child, pytest.raises(TimeoutError, match="waited for it"):
        child.ask(10, failed="waited for it")


@pytest.mark.slow
def test_memory_and_cpu_of_a_process_that_runs(echo: Path) -> None:
    with processes.Asked.running(echo) as child:
        child.ask(10, act="one")
        assert processes.resident_bytes(child.pid) > 1_000_000
        assert processes.cpu_s(child.pid) >= 0


def test_a_profile_counts_by_part_package_and_function() -> None:
    listed = "  7f00 (/usr/lib/libpython3.11.so)\n  ff00 ([kernel.kallsyms])\n  00 (/x/odd.so)\n"
    stacks = (
        "<module> (/v/bin/rdzvd:8);write (/r/rdzv/server/wire/out.py:9);g (/lib/enum.py:3) 3\n"
        "<module> (/v/bin/rdzvd:8);_run (/lib/python3.11/asyncio/events.py:80) 1\n"
        "main (/elsewhere.py:1) 1\n"
    )
    counted = profiling.functions(stacks)
    assert counted == {
        "rdzv/server/wire/out.py write": 3,
        "asyncio/events.py _run": 1,
        "other": 1,
    }
    shown = str(profiling.Profile(profiling.parts(listed), counted))
    assert " 33.3 %  Python's interpreter\n" in shown
    assert " 33.3 %  kernel\n" in shown
    assert " 33.3 %  odd.so\n" in shown
    assert " 60.0 %  rdzv/server/wire\n" in shown
