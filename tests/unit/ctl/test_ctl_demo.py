"""rdzvctl demo: what it refuses, and how it runs its programs. `make dist-test` runs it."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from fake_control import Capture
from stories import second_run, told

from rdzv.ctl.__main__ import run
from rdzv.demo import programs, story
from rdzv.structs import replace
from rdzv.view import as_json

WITHOUT_TORCH = """#!/bin/sh
exec {python} -I -S "$@"
"""


@pytest.mark.slow
def test_an_interpreter_without_torch_is_refused_with_the_remedy(
    tmp_path: Path, capfd: Capture
) -> None:
    python = tmp_path / "python"
    python.write_text(WITHOUT_TORCH.format(python=sys.executable))
    python.chmod(0o755)
    assert run(["demo", "--python", str(python)]) == 1
    said = capfd.readouterr()
    assert said.out.startswith("rdzv "), "it speaks before it looks"
    assert f"rdzvctl: the interpreter '{python}' has no torch" in said.err
    assert f"`{python} -m pip install torch`" in said.err


@pytest.mark.slow
def test_an_interpreter_that_is_not_there_is_refused(capfd: Capture) -> None:
    assert run(["demo", "--python", "/nowhere/python"]) == 1
    assert "cannot run the interpreter '/nowhere/python'" in capfd.readouterr().err


def test_its_programs_take_no_launch_settings_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_NNODES", "9")
    monkeypatch.setenv("RDZV_SERVER", "elsewhere:1")
    kept = programs.environment("/job/python")
    assert kept["PYTHON_EXEC"] == "/job/python"
    assert not [name for name in kept if name.startswith(("PET_", "RDZV_"))]


def test_a_failed_step_is_one_error_that_names_the_folder_of_the_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(demo: story.Demo) -> None:
        (demo.folder / "n1.log").write_text("why")
        raise story.DemoError("n1 has no workers")

    monkeypatch.setattr(story, "check_torch", lambda python: None)
    monkeypatch.setattr(story.Demo, "play", fails)
    monkeypatch.setattr(story.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    with pytest.raises(story.DemoError, match=f"n1 has no workers; all output is in {tmp_path}"):
        story.play(sys.executable, keep=False)
    assert (tmp_path / "n1.log").read_text() == "why"


@pytest.mark.slow
async def test_what_rdzvctl_says_of_the_job_is_shown_and_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    seen = (await told(second_run)).status
    status = replace(seen, state="running", world_size=4, restarts=1, max_restarts=3)
    demo = story.Demo(tmp_path, sys.executable)
    monkeypatch.setattr(demo, "rdzvctl", lambda *_: as_json.document(status))
    script = "echo rank 0 of 4: resuming from epoch 2; echo rank 0 of 4: starting afresh"
    n1 = programs.DemoProgram("n1", ["sh", "-c", script], {}, tmp_path / "n1.log")
    demo.nodes["n1"] = n1
    demo.await_training(4, 1, demo.began_s, "it went on")
    said = capsys.readouterr().out
    assert "s, resuming from epoch 2" in said
    assert f"  rdzvctl: running, {status.reason.headline}; restarts 1 of 3\n" in said
    with pytest.raises(story.DemoError, match=r"4 workers with 0 restarts spent, but rdzvctl says"):
        demo.await_training(4, 0, demo.began_s, "it went on")
    with pytest.raises(story.DemoError, match="n1 exited with 0; awaited: the next epoch"):
        demo.await_epochs(1)


@pytest.mark.slow
def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    child = "import time; time.sleep(100)"
    script = (
        "import subprocess, sys, time\n"
        f"worker = subprocess.Popen([sys.executable, '-S', '-c', {child!r}], env={{'RANK': '0'}})\n"
        "print('worker', worker.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    command = [sys.executable, "-S", "-c", script]
    program = programs.DemoProgram("n1", command, {}, tmp_path / "n1.log")
    try:
        deadline = time.monotonic() + 60
        while (said := program.next(re.compile(r"^worker (\d+)$"))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker = int(said[1])
        while program.workers() != [worker]:  # Until it runs its own program.
            assert time.monotonic() < deadline
            time.sleep(0.01)
        program.kill_all()
        assert program.ended()
        while programs.environ_of(worker):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        program.kill_all()


@pytest.mark.slow
def test_output_is_searched_once_line_by_line_also_after_the_program_has_ended(
    tmp_path: Path,
) -> None:
    log = tmp_path / "n1.log"
    log.write_text("epoch 0 of an earlier one\n")
    script = "printf 'epoch 1\\nepoch 2\\n\\377epoch 3\\nepoch 4'"
    program = programs.DemoProgram("n1", ["sh", "-c", script], {}, log)
    assert program.process.wait(60) == 0
    found = [program.next(re.compile(r"epoch (\d)")) for _ in range(4)]
    assert [match and match[1] for match in found] == ["1", "2", "3", None], "4 may be incomplete"


def test_a_wait_is_never_silent_and_says_what_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    clock = [100.0]
    monkeypatch.setattr(story.time, "monotonic", lambda: clock[0])
    demo = story.Demo(tmp_path, sys.executable)
    demo.say("started")
    for clock[0] in (100.5, 101.0, 101.5, 105.5, 106.0):
        demo.note_wait("the server to start")
    assert capsys.readouterr().out.splitlines() == [
        "[  0.0 s] started",
        "[  1.0 s]   waiting for the server to start ...",
        "[  6.0 s]   waiting for the server to start ...",
    ]
    clock[0] = 100.0 + story.DEADLINE_S + 1
    with pytest.raises(
        story.DemoError, match="still waiting for the server to start when the demo's"
    ):
        demo.note_wait("the server to start")
