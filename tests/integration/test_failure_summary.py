"""After a failure on one node, every node reports the same cause, and its own consequences."""

from __future__ import annotations

import re
from pathlib import Path

from cluster import cluster

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]
LOST = "RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:4711"


def wait_for(name):
    deadline = time.monotonic() + 60
    while not (FOLDER / name).exists():
        if time.monotonic() > deadline:
            sys.exit(99)
        time.sleep(0.005)


def fail(message, stack):
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}})
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(text)


signal.signal(signal.SIGTERM, signal.SIG_IGN if RANK in "012" else signal.SIG_DFL)
(FOLDER / f"ready-{RANK}").touch()
for rank in range(4):
    wait_for(f"ready-{rank}")
if RANK == "2":
    fail("ValueError: no such column", "the stack of it")
    (FOLDER / "failed").touch()
    wait_for("followed")
    sys.exit(3)
if RANK == "0":
    wait_for("failed")
    fail(LOST, f"a stack of {LOST}")
    (FOLDER / "followed").touch()
    sys.exit(1)
time.sleep(600)
"""


def test_the_root_cause_its_followers_and_the_ended_are_told_apart_on_every_node(
    tmp_path: Path,
) -> None:
    script = tmp_path / "fail.py"
    script.write_text(SCRIPT)
    with cluster(tmp_path) as c:
        first, second = (
            c.start_node(
                name,
                *("--rdzv-conf=failure_stop_timeout=0.5", *flags),
                worker=str(script),
                args=(str(tmp_path),),
                nnodes="2",
                nproc=2,
            )
            # The worker that fails is on the other node.
            for name, flags in (("n1", ["--exit-code=root-cause"]), ("n2", []))
        )
        assert [first.wait(), second.wait()] == [3, 1]
    told = [node.text.partition("Root cause, ")[2].splitlines() for node in (first, second)]
    for lines in told:
        assert lines[0] == "the first failure of the last round:"
        assert lines[1].startswith("  rank 2 (local_rank 0) on n2 (127.0.0.1), pid ")
        assert lines[1].endswith(": exit code 3")
        assert lines[2:4] == ["  ValueError: no such column", "  the stack of it"]
        assert lines[4] == "Failed because of it, when their connections broke:"
        assert lines[5].startswith("  rank 0 (local_rank 0) on n1 (127.0.0.1), pid ")
        assert lines[5].endswith(
            ": RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:4711"
        )
        assert lines[6] == "Ended by this node's agent (1 worker of 2):"
    [ended] = told[0][7:]
    assert re.fullmatch(r"  local_rank 1: SIGTERM, and SIGKILL \d+(\.\d)? s later", ended)
    assert told[1][7:] == ["  local_rank 1: SIGTERM"]
