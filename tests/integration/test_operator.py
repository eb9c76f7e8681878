"""An operator's commands have their documented effect on a real job."""

from __future__ import annotations

import json
import signal
import subprocess

from cluster import BIN, JOB, Cluster


def ctl(c: Cluster, *args: str) -> tuple[int, str]:
    done = c.run("rdzvctl", *args, environ={"RDZV_SERVER": c.endpoint})
    return done.returncode, (done.stdout + done.stderr).strip()


def test_restart_scale_wait_and_stop(c: Cluster) -> None:
    nodes = [c.start_node(f"n{i}", nnodes="1:2") for i in (1, 2)]
    c.wait_for_round(0, workers=2)
    waiting = subprocess.Popen(
        [BIN / "rdzvctl", "--server", c.endpoint, "wait", JOB],
        stdout=subprocess.PIPE,
        text=True,
        env=c.environ(),
    )
    try:
        assert ctl(c, "restart", JOB) == (0, f"{JOB}: round 0 ends, and another forms")
        after = c.wait_for_round(1, workers=2)
        assert {report["TORCHELASTIC_RESTART_COUNT"] for report in after} == {"0"}
        assert ctl(c, "scale", JOB, "1:1", "--reason", "night rate")[0] == 0
        assert c.wait_for_round(2, workers=1)[0]["WORLD_SIZE"] == "1"
        status = c.status()
        assert (status.min_nodes, status.max_nodes, status.restarts) == (1, 1, 0)
        assert [node.state for node in status.nodes] == ["seated", "spare"]
        code, said = ctl(c, "wait", JOB, "--for=3")
        assert code == 4
        assert said.startswith(f"{JOB} is running after 3 s\nrdzvctl: {JOB} is running: ")
        assert ctl(c, "stop", JOB)[0] == 0
        said, _ = waiting.communicate(timeout=120)
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 3
    assert said.startswith(f"{JOB} has stopped: stopped by ")
    assert [node.wait() != 0 for node in nodes] == [True, True]
    code, text = ctl(c, "events", JOB)
    assert code == 0
    assert "night rate" in text
    code, text = ctl(c, "stop", JOB)
    assert code == 1
    assert "has stopped " in text
    assert " ago; nothing was changed" in text
    assert ctl(c, "restart", JOB)[0] == 1


def test_watch_shows_every_state_until_the_end_also_over_a_restart_of_the_server(
    c: Cluster,
) -> None:
    node = c.start_node("n1", nnodes="1")
    c.wait_for_round(0, workers=1)
    with subprocess.Popen(
        [BIN / "rdzvctl", "--server", c.endpoint, "status", JOB, "--watch", "-o", "json"],
        stdout=subprocess.PIPE,
        text=True,
        env=c.environ(),
    ) as watching:
        assert watching.stdout is not None
        try:
            assert json.loads(watching.stdout.readline())["state"] == "running"
            c.kill_server()
            c.start_server()
            c.finish()
            # Readline may have read ahead into the buffer, which communicate() ignores.
            rest = watching.stdout.read()
            watching.wait(120)
        finally:
            watching.kill()
    assert json.loads(rest.splitlines()[-1])["state"] == "succeeded"
    assert watching.returncode == 0
    assert node.wait() == 0


def test_a_wait_notices_that_its_server_is_stopped(c: Cluster) -> None:
    """It would have waited for ever, had the machine of the server been lost."""
    node = c.start_node("n1", nnodes="1")
    c.wait_for_round(0, workers=1)
    waits = c.start_program("waits", "rdzvctl", "--server", c.endpoint, "wait", JOB)
    c.wait_until("it says what the job does", lambda: "is running" in waits.text)
    assert c.server is not None
    c.server.send_signal(signal.SIGSTOP)
    try:
        c.wait_until("it looks for another server", lambda: "trying again" in waits.text)
    finally:
        c.server.send_signal(signal.SIGCONT)
    c.finish()
    assert (node.wait(), waits.wait()) == (0, 0)
