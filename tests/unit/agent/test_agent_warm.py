"""--warm: what it accepts, what the zygote gets, and which workers can be forked from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rdzv.agent.cli.options import parse_launch
from rdzv.agent.core.environ import worker_environ
from rdzv.agent.job_programs import zygote as zygote_module
from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner.requests import WorkerSpec, ZygoteSpec
from rdzv.agent.workers import warm
from rdzv.errors import InvalidRequestError
from rdzv.structs import replace


@pytest.fixture(autouse=True)
def _as_users_have_it(restarts_as_by_default: None) -> None:
    """Unset PET_WARM."""


def launch(*argv: str) -> Launch:
    return parse_launch([*argv, "train.py", "--lr=1"])[0]


# ---------------------------------------------------------------------- the flag


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), ()),
        (("--warm",), ("torch",)),
        (("--warm=torch,transformers",), ("torch", "transformers")),
        (("--warm=my.own",), ("my.own",)),
        (("--warm", "--nproc-per-node=2"), ("torch",)),
    ],
)
def test_what_is_preloaded(argv: tuple[str, ...], expected: tuple[str, ...]) -> None:
    """A bare --warm is followed by the script, or by another flag."""
    found = launch(*argv)
    assert found.warm == expected
    assert (found.script, found.args) == ("train.py", ("--lr=1",))


def test_a_default_for_all_jobs_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_WARM", "torch,numpy")
    assert launch().warm == ("torch", "numpy")


@pytest.mark.parametrize("text", ["a-b", "torch,", "1", "a..b"])
def test_what_is_no_module_is_refused(text: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="is not a module name; give names such as --warm=torch"
    ):
        launch(f"--warm={text}")


def test_what_ddp_imports_comes_with_torch() -> None:
    assert warm.preloaded(["numpy", "torch"]) == ("numpy", "torch", "torch._dynamo")
    assert warm.preloaded(["torch", "torch._dynamo"]) == ("torch", "torch._dynamo")
    assert warm.preloaded(["numpy"]) == ("numpy",)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), False),
        (("--max-restarts=1",), True),
        (("--nnodes=1:2", "--rdzv-endpoint=server:1", "--rdzv-id=job"), True),
        (("--nnodes=2", "--rdzv-endpoint=server:1", "--rdzv-id=job"), False),
        (("--max-restarts=1", "--no-warm"), False),
        (("--max-restarts=1", "--no-python"), False),
        (("--max-restarts=1", "--no-python", "--run-path"), True),
        (("--max-restarts=1", "--warm=numpy"), False),
    ],
)
def test_restarts_are_warm_if_there_can_be_some(argv: tuple[str, ...], expected: bool) -> None:
    assert launch(*argv).warm_restarts is expected


@pytest.mark.parametrize(
    ("environ", "argv", "expected"),
    [
        ("torch", ("--no-warm",), ()),
        ("", (), ()),
        ("", ("--warm=numpy",), ("numpy",)),
        (None, ("--warm=numpy", "--no-warm"), ()),
        (None, ("--no-warm", "--warm=numpy"), ("numpy",)),
        (None, ("--warm=",), ()),
    ],
)
def test_the_last_word_about_warmth_holds(
    monkeypatch: pytest.MonkeyPatch,
    environ: str | None,
    argv: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    if environ is not None:
        monkeypatch.setenv("PET_WARM", environ)
    found = launch("--max-restarts=1", *argv)
    assert (found.warm, found.warm_restarts) == (expected, False)


def test_a_zygote_for_restarts_imports_torch_after_the_workers() -> None:
    zygote = warm.zygote_spec(launch("--max-restarts=1"), environ_of(0), (None,))
    assert (zygote.modules, zygote.after_import) == (("torch", "torch._dynamo"), True)
    assert zygote_of(environ_of(0)).after_import is False


# ---------------------------------------------------------------------- the zygote's environment


def test_what_was_changed_in_the_zygotes_environment_is_changed_in_a_workers_too() -> None:
    given = {b"SAME": b"1", b"SET": b"1", b"DROPPED": b"1", b"OTHER": b"1", b"OWN": b"1"}
    asked = given | {b"OWN": b"2", b"RANK": b"3"}
    before = dict(os.environb)
    try:
        os.environb.clear()
        os.environb.update(
            {b"SAME": b"1", b"SET": b"9", b"OTHER": b"1", b"OWN": b"9", b"NEW": b"9"}
        )
        zygote_module.change_environment(asked, given)
        assert dict(os.environb) == {
            **{b"SAME": b"1", b"SET": b"9", b"OTHER": b"1"},
            **{b"OWN": b"2", b"RANK": b"3", b"NEW": b"9"},
        }
    finally:
        os.environb.clear()
        os.environb.update(before)


def environ_of(local_rank: int, round_: int = 3, **base: str) -> dict[str, str]:
    assignment = replace(
        warm.NO_ROUND,
        **{"round": round_, "rank_first": 4, "world_size": 8, "group_rank": 2, "restarts": round_},
        master_addr="10.0.0.1",
        master_port=round_,
        use_agent_store=False,
        max_restarts=9,
    )
    return worker_environ(
        base,
        assignment,
        rdzv_id="job",
        role="default",
        local_rank=local_rank,
        local_world_size=2,
        error_file=f"/logs/{round_}/{local_rank}",
        progress_file=f"/progress/{round_}/{local_rank}",
        notice_file=f"/progress/{round_}/notice",
        virtual_local_rank=True,
    )


def worker(environ: dict[str, str], cpus: tuple[int, ...] | None = None) -> WorkerSpec:
    return WorkerSpec(0, ("python",), environ, None, None, None, cpus)


def zygote_of(environ: dict[str, str], *cpus: tuple[int, ...] | None) -> ZygoteSpec:
    return warm.zygote_spec(launch("--warm"), environ, cpus or (None,))


def test_the_zygote_has_what_workers_of_all_rounds_have_in_common() -> None:
    zygote = zygote_of(environ_of(0, HOME="/home/me"))
    assert zygote.env == {
        "HOME": "/home/me",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert zygote.argv == (sys.executable, "-u", "train.py", "--lr=1")
    for local_rank in range(2):
        for round_ in range(3, 5):
            environ = environ_of(local_rank, round_, HOME="/home/me")
            assert warm.why_cold(zygote, worker(environ)) == ""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"TORCH_LOGS": "all"}, "its TORCH_LOGS is 'all', but the zygote has unset"),
        ({"OMP_NUM_THREADS": "4"}, "its OMP_NUM_THREADS is '4', but the zygote has '1'"),
        ({"MINE": ""}, "its MINE is '', but the zygote has unset"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, ""),
        ({"NCCL_DEBUG": "INFO"}, ""),
        ({"RDZV_SNAPSHOT": "2:40:f00d", "RDZV_SNAPSHOT_ORIGIN": "2"}, ""),
    ],
)
def test_a_worker_of_a_read_environment_is_cold(changed: dict[str, str], why: str) -> None:
    """A plug-in of --logs-specs, for example, may give each worker its own variables."""
    assert warm.why_cold(zygote_of(environ_of(0)), worker(environ_of(0) | changed)) == why


def test_a_variable_that_a_worker_lacks_counts_as_well() -> None:
    zygote = zygote_of(environ_of(0, LANG="C"))
    why = "its LANG is unset, but the zygote has 'C'"
    assert warm.why_cold(zygote, worker(environ_of(0))) == why


def test_bound_workers_are_cold_only_where_openmp_counts_cpus() -> None:
    environ = environ_of(0)
    assert zygote_of(environ, (0, 1), (0, 1)).cpus == (0, 1)
    assert zygote_of(environ, (0,), (1,)).cpus is None
    assert warm.why_cold(zygote_of(environ, (0,), (1,)), worker(environ, (0,))) == ""
    del environ["OMP_NUM_THREADS"]
    assert warm.why_cold(zygote_of(environ, (0, 1)), worker(environ, (0, 1))) == ""
    why = warm.why_cold(zygote_of(environ, (0,), (1,)), worker(environ, (0,)))
    assert (
        why
        == "its CPUs, which determine OpenMP's number of threads on import, are not the zygote's"
    )


@pytest.mark.parametrize("text", ["soon", "-1", "601", "nan"])
def test_a_wait_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_WARM_WAIT", text)
    with pytest.raises(InvalidRequestError, match=f"RDZV_WARM_WAIT={text}: give the seconds that"):
        zygote_of({})


def test_a_wait_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zygote_of({}).wait_s == 0.0
    monkeypatch.setenv("RDZV_WARM_WAIT", "2.5")
    assert zygote_of({}).wait_s == 2.5


# ---------------------------------------------------------------------- what no fork can use


@pytest.mark.parametrize("device", ["/dev/infiniband/uverbs0", "/dev/kfd", "/dev/davinci3"])
@pytest.mark.parametrize("how", ["opens", "maps"])
def test_an_import_that_uses_a_device_is_refused(
    device: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, mapped = ({7: device}, set[str]()) if how == "opens" else ({}, {"/lib/c.so", device})
    monkeypatch.setattr(zygote_module, "open_fds", lambda: opened)
    monkeypatch.setattr(zygote_module, "mapped_files", lambda: mapped)
    monkeypatch.setattr(zygote_module, "thread_names", list)
    monkeypatch.setattr(zygote_module, "child_pids", list)
    monkeypatch.setattr(zygote_module.sys, "_current_frames", dict)
    with pytest.raises(
        zygote_module.RefusedError, match=f"import plugin {how} a device, .*{device}"
    ):
        zygote_module.check_forkable("plugin", 1, set())


def test_a_torch_with_wrong_sums_in_a_fork_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ones:
        T = None

        def __matmul__(self, _: object) -> Ones:
            return self

        def sum(self) -> SimpleNamespace:
            return SimpleNamespace(item=lambda: 7)

    threads: list[int] = []
    torch = SimpleNamespace(
        get_num_threads=lambda: 1, set_num_threads=threads.append, ones=lambda *_: Ones()
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    assert zygote_module.compute() == "torch computes a wrong sum"
    assert threads == [2]


def test_mapped_files_are_found() -> None:
    mapped = zygote_module.mapped_files()
    assert str(Path(sys.executable).resolve()) in mapped
    assert not any(path.startswith("[") for path in mapped)


HANGING = """
import os, time
from rdzv.agent.job_programs import zygote
zygote.CANARY_TIMEOUT_S = 0.2
os.register_at_fork(after_in_child=lambda: time.sleep(99))
try:
    zygote.try_fork()
except zygote.RefusedError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_fork_that_hangs_is_refused_and_killed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "a fork of it hangs: it has not computed within 0.2 s\n"


PRELOADING = """
import sys
from rdzv.agent.job_programs import zygote
zygote._preload(["torch"])
print("rdzv.worker.session" in sys.modules)
"""


@pytest.mark.slow
def test_the_library_of_workers_that_stay_is_preloaded_with_torch() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "worker")}
    ended = subprocess.run(
        [sys.executable, "-c", PRELOADING], capture_output=True, text=True, env=env, check=True
    )
    assert ended.stdout == "True\n"


# ---------------------------------------------------------------------- asking beforehand


@pytest.mark.slow
async def test_modules_are_looked_for_from_where_the_script_is(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("raise SystemExit('imported')\n")
    script = tmp_path / "train.py"
    script.touch()
    found = replace(launch("--warm=json,beside_it"), script=str(script))
    assert await warm.check_warm(found) == ""
    elsewhere = replace(found, script="/train.py")
    with pytest.raises(InvalidRequestError, match="has no beside_it: No module named 'beside_it'"):
        await warm.check_warm(elsewhere)
    module = replace(found, script="train", module=True, chdir=tmp_path)
    assert await warm.check_warm(module) == ""


async def test_a_program_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="--warm=torch and --no-python exclude each oth"):
        await warm.check_warm(launch("--warm", "--no-python"))


@pytest.mark.slow
async def test_a_sitecustomize_that_fails_is_told_beforehand(tmp_path: Path) -> None:
    """Without --warm it would be a line in the log of each worker."""
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('not today')\n")
    found = launch("--warm=json")
    found = replace(found, environ={**found.environ, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(InvalidRequestError, match="its sitecustomize: ValueError: not today; le"):
        await warm.check_warm(found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-I", "-S", "-E"])
async def test_an_interpreter_that_runs_scripts_is_refused(how: str, tmp_path: Path) -> None:
    """The zygote has a worker's command line, so another one is used to find this out first."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {how} "$@"\n')
    python.chmod(0o755)
    found = replace(launch("--warm=json"), python=str(python))
    with pytest.raises(InvalidRequestError, match="runs no sitecustomize from PYTHONPATH"):
        await warm.check_warm(found)


async def test_an_interpreter_that_does_not_answer_means_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    monkeypatch.setattr(warm, "ASK_TIMEOUT_S", 0.05)
    why = await warm.check_warm(replace(launch("--warm=json"), python=str(python)))
    assert why == f"{python} does not list its modules: no answer in time"
