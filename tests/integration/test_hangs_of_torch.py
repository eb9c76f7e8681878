"""Plain scripts of torch hang, and the rank that the others wait for is named.

They import nothing of rdzv and report no progress; the hook that opens torch's record to the agent
changes nothing that a script can see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import FORK_ALL, JOB, cluster

from rdzv.agent.observers.collective_records import with_hook

BIN = Path(sys.executable).parent
DEADLINE_S = 120.0

TRAIN = """
import os, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
for step in range(10_000):
    time.sleep(0.02)
    if step == 60 and rank == 1:
        if how == "absent":
            time.sleep(600)
        elif how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "other":
            dist.broadcast(torch.ones(4), src=2)
    dist.all_reduce(torch.ones(4))
# Without this, torch aborts some processes at their end.
dist.destroy_process_group()
"""


def rdzvrun(
    *arguments: str | Path, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "rdzvrun", "--standalone", *arguments],
        env={**os.environ, **FORK_ALL, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture(name="train")
def _train(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        (
            "absent",
            ("--nproc-per-node=2",),
            "hung: RANK 1 has not entered all_reduce #61 of the default group; RANK 0 has waited",
        ),
        (
            "stopped",
            ("--nproc-per-node=2", "--warm=torch"),
            "hung: RANK 1 is stopped by a signal; RANK 0 has waited in all_reduce #61 of the",
        ),
        (
            "other",
            ("--nproc-per-node=3", "--warm=torch"),
            "hung: RANK 1 has entered broadcast as #61 of the default group, where RANK 0,2 have "
            "entered all_reduce",
        ),
    ],
)
def test_a_hang_names_the_rank_that_the_others_wait_for(
    how: str, options: tuple[str, ...], said: str, train: Path
) -> None:
    # The path of a socket has 107 bytes at most, and that of this folder is longer.
    folder = train.parent / ("long" * 25)
    folder.mkdir()
    done = rdzvrun(*options, "--hang-timeout=4", train, how, environ={"TMPDIR": str(folder)})
    assert done.returncode == 1
    (ended,) = (line for line in done.stderr.splitlines() if ": round 0 ended " in line)
    assert "(worker failure): rank 1 (local_rank 1) on " in ended, done.stderr
    assert f": {said}" in ended
    assert "no collective completed for " in done.stderr


TIMES_OUT = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
# Not before: until all have imported torch it may take longer.
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
for step in range(10_000):
    time.sleep(0.02)
    if step == 60 and dist.get_rank() == int(sys.argv[1]):
        time.sleep(600)
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("absent", [pytest.param(0, marks=pytest.mark.campaign), 3])
def test_a_timeout_of_a_collective_names_the_rank_that_has_not_entered_it(
    absent: int, tmp_path: Path
) -> None:
    """On two nodes, without --hang-timeout: three ranks fail, and the fourth is the culprit."""
    script = tmp_path / "times_out.py"
    script.write_text(TIMES_OUT)
    with cluster(tmp_path) as c:
        for name in ("n1", "n2"):
            common = (f"--rdzv-endpoint={c.endpoint}", f"--rdzv-id={JOB}", f"--node-id={name}")
            command = [str(BIN / "rdzvrun"), *common, "--nnodes=2", "--nproc-per-node=2"]
            c.start(name, [*command, "--warm=torch", str(script), str(absent)], environ=FORK_ALL)
        assert [node.wait(DEADLINE_S) for node in c.nodes] == [1, 1]
        failed = c.wait_for_state("failed").last_failure
        assert failed is not None
        assert failed.root_cause.rank == absent
        said = (
            f"a collective timed out: RANK {absent} has not entered all_reduce #61 of the default "
            "group; RANK "
        )
        assert (failed.root_cause.message or "").startswith(said)
        assert said in c.run("rdzvctl", "--server", c.endpoint, "status", JOB).stdout
        with c.client() as client:
            (taken,) = [e for e in client.events(JOB) if e.name == "StacksTaken"]
        assert (taken.fields or {})["ranks"] == [absent]


ENDS = """
import glob, json, os, sys, torch
import torch.distributed as dist

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.new_group([0])
dist.new_group([0], use_local_synchronization=True)
(groups,) = glob.glob("collectives.*.groups")
print(*(line.rpartition(" ")[2].strip() for line in open(groups)))
GLOO = "[/src/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] it took too long"

def inside(function, statement):
    # A frame of torch, as a collective's exception has.
    file = os.path.join(os.path.dirname(dist.__file__), "distributed_c10d.py")
    names = {"GLOO": GLOO, "dist": dist}
    exec(compile(f"def {function}():\\n    {statement}", file, "exec"), names)
    names[function]()

def wrapped():
    try:
        inside("all_reduce", "raise RuntimeError(GLOO)")
    except RuntimeError as error:
        raise KeyError("the step failed") from error

def caught(error):
    try:
        raise ValueError("timed out; Connection closed by peer")
    except ValueError:
        raise error from None

def fail(error):
    raise error

ENDS = [
    lambda: fail(OSError("s3://bucket: Read timed out. Connection reset by peer")),
    lambda: fail(dist.DistNetworkError("The client socket has timed out after 12000ms")),
    lambda: inside("all_reduce", "raise RuntimeError('Invalid scalar type: timed out')"),
    lambda: inside("_new_process_group_helper", "raise RuntimeError(GLOO)"),
    lambda: caught(KeyError("x")),
    lambda: inside("all_reduce", "raise RuntimeError(GLOO)"),
    wrapped,
    lambda: inside("recv", "raise RuntimeError(GLOO)"),
    lambda: fail(RuntimeError(GLOO)),
    lambda: inside("barrier", "raise dist.DistBackendError('NCCL communicator was aborted')"),
]
for end in ENDS:
    try:
        end()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    (left,) = glob.glob("collectives.*.last") or [None]
    print(None if left is None else json.loads(open(left, "rb").readline())["failed"])
    if left is not None:
        os.unlink(left)
dist.destroy_process_group()
"""


def test_an_exception_is_a_collectives_by_its_type_and_where_it_was_raised(tmp_path: Path) -> None:
    """What its text says does not matter, except for the place in gloo that raised it.

    The RANKs of the groups that the script has made are shown, too.
    """
    (tmp_path / "ends.py").write_text(ENDS)
    environ = {**os.environ, "RDZV_PROGRESS_FILE": str(tmp_path / "progress")}
    done = subprocess.run(
        [sys.executable, "ends.py"],
        cwd=tmp_path,
        env=with_hook(environ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    groups, said = ["0", "0"], ["None", *["None"] * 4, "True", "True", *["False"] * 3]
    assert done.stdout.split() == groups + said, done.stderr


def test_without_the_trace_nobody_is_watched_by_collectives(train: Path) -> None:
    script = train.read_text().replace("range(10_000)", "range(62)").replace("(600)", "(12)")
    train.write_text(script)
    done = rdzvrun(
        *("--nproc-per-node=2", "--warm=torch", "--hang-timeout=3", "--no-collective-trace"),
        *(train, "absent"),
    )
    assert done.returncode == 0, done.stderr
    assert " hangs: " not in done.stderr


SEEN = """
import multiprocessing, os, subprocess, sys

def seen():
    ours = {name for name in (*sys.modules, *sys.path) if "rdzv" in name or "hook" in name}
    path = [os.environ.get(name) for name in ("PYTHONPATH", "RDZV_PYTHONPATH", "CUSTOMIZED")]
    return sorted(ours), path, "sitecustomize" in sys.modules, sys.meta_path[1:] == finders

finders = sys.meta_path[-3:]

if __name__ == "__main__":
    print(sys.path[1:3], seen()[:3], "torch" in sys.modules)
    print(subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True))
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print(dist.init_process_group.__name__, dist.init_process_group.__module__)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(seen)[:3])
    from torch.utils.data import DataLoader
    print(list(DataLoader(range(4), num_workers=2)))
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    print(os.waitpid(pid, 0)[1], flush=True)
    dist.destroy_process_group()
"""
CHILD = (
    "import os, sys; print(os.environ.get('PYTHONPATH'), os.environ.get('CUSTOMIZED'), sys.path)"
)


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(True, id="with a sitecustomize"),
        pytest.param(False, id="without", marks=pytest.mark.campaign),
    ],
)
def test_a_script_sees_nothing_of_it(own: bool, tmp_path: Path) -> None:
    """Neither do its children, however they are started."""
    script, site = tmp_path / "script.py", tmp_path / "site"
    script.write_text(SEEN.replace("CHILD", repr(CHILD)))
    site.mkdir()
    environ = {}
    if own:
        text = "import os\nos.environ['CUSTOMIZED'] = 'yes, ' + str(os.environ.get('CUSTOMIZED'))\n"
        (site / "sitecustomize.py").write_text(text)
        environ = {"PYTHONPATH": str(site)}
    traced, plain = (
        rdzvrun(*options, "--nproc-per-node=1", script, environ=environ)
        for options in ((), ("--no-collective-trace",))
    )
    assert (traced.returncode, plain.returncode) == (0, 0), traced.stderr
    assert traced.stdout == plain.stdout
    assert ("'yes, " in traced.stdout) is own
    ours = [line for line in traced.stderr.splitlines() if " rdzvrun[" not in line]
    assert ours == [line for line in plain.stderr.splitlines() if " rdzvrun[" not in line]


def test_where_it_cannot_work_the_log_says_so_once(tmp_path: Path) -> None:
    script = tmp_path / "isolated.py"
    script.write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "Path(os.environ['RDZV_PROGRESS_FILE']).write_text('1')\n"
        "time.sleep(600)\n"
    )
    options = ("--nproc-per-node=2", "--hang-timeout=3", "--no-python")
    done = rdzvrun(*options, sys.executable, "-I", script)
    assert done.returncode == 1
    assert done.stderr.count("no record of collectives for pid ") == 1, done.stderr
    assert "use -E, -I or -S?" in done.stderr
