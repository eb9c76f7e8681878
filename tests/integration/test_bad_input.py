"""Invalid input from people: which program reports it, in which words, and what keeps running."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from cluster import BIN, JOB, WORKERS, Cluster, Node, alive
from ports import free_port

pytestmark = pytest.mark.usefixtures("own_temporary_folder")

REPORT = str(WORKERS / "report.py")
LONG = "x" * 300
AT_ONCE = "--rdzv-conf=last_call_timeout=0"


def text_when(c: Cluster, node: Node, words: str) -> str:
    found = c.wait_until(f"{node.name} says {words!r}", lambda: words in node.text and node.text)
    assert isinstance(found, str)
    assert "Traceback" not in found
    return found


# ------------------------------------------------------------------ the command line

ENDPOINT = "--rdzv-endpoint=127.0.0.1:1"
USAGE = [
    ("--nnodes=4:2", "--nnodes=4:2: the minimum 4 is above the maximum 2; swap them?"),
    ("--nnodes=0", "--nnodes=0: give a whole number from 1 to 1000000"),
    ("--nnodes=1:99999999999", "--nnodes=99999999999: give a whole number from 1 to 1000000"),
    ("--nnodes=1:" + "9" * 5000, "999...: give a whole number from 1 to 1000000"),
    ("--nnodes=2", "--nnodes=2 needs a server; start rdzvd and give its address as"),
    (f"--nnodes=2 {ENDPOINT}", "give all nodes of this job the same --rdzv-id=NAME"),
    ("--nproc-per-node=999999999", "--nproc-per-node=999999999: give a whole number from 1"),
    ("--nproc-per-node=" + "9" * 5000, "999...: give a whole number from 1 to 1000000"),
    ("--max-restarts=99999999999", "--max-restarts=99999999999: give a whole number from 0"),
    ("--no-such-flag", "--no-such-flag is not a flag; see rdzvrun --help"),
    ("--rdzv-conf=garbage", "--rdzv-conf: 'garbage' is not of the form key=value"),
    ("--rdzv-conf==,=", "--rdzv-conf: '=' is not of the form key=value"),
    ("--rdzv-conf=join_timeout=0", "join_timeout=0: give a number of seconds from 0.001"),
    ("--rdzv-conf=join_timeout=9e9", "join_timeout=9e9: give a number of seconds from 0.001"),
    ("--redirects=" + "1" * 5000 + ":1", "is not of the form LOCAL_RANK:N with N from 0 to 3"),
    (
        "--rdzv-endpoint=head:port --rdzv-id=a",
        "'port' is not a port; a port is a number from 1",
    ),
    ("--rdzv-id=\udcff", r"--rdzv-id '\udcff' has characters that are not allowed"),
    ("--rdzv-id=a\x1b[31m", r"--rdzv-id 'a\x1b[31m' has characters that are not allowed"),
    ("--node-id=\udcff", r"--node-id '\udcff' has characters that are not allowed"),
    ("--role=\udcff", r"--role '\udcff' has characters that cannot be printed"),
    ("--topology=a\x07b", r"--topology 'a\x07b' has characters that cannot be printed"),
    ("--local-addr=\udcff", r"--local-addr '\udcff' has characters that cannot be printed"),
    ("--log-dir=finish", "finish is not a directory; give another"),
    ("--log-dir=finish/a/b", "finish is not a directory; give another"),
]


@pytest.mark.parametrize(("options", "said"), USAGE, ids=[row[0][:40] for row in USAGE])
def test_a_wrong_command_line_is_refused_before_anything_starts(
    alone: Cluster, options: str, said: str
) -> None:
    temporary = alone.folder / "tmp"
    temporary.mkdir()
    alone.finish()
    environ = {"TMPDIR": str(temporary)}
    ended = alone.run("rdzvrun", *options.split(" "), REPORT, environ=environ)
    assert ended.returncode == 2, ended
    assert said in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("rdzvrun: ")
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not alone.all_reports()
    assert not any(temporary.iterdir())


@pytest.mark.parametrize("option", ["--rdzv-id", "--node-id"])
@pytest.mark.parametrize("value", ["../up", "/etc/x", "..", ".hidden", "a b", "-rf", "ä", LONG])
def test_a_name_that_would_make_a_strange_path_makes_none(
    alone: Cluster, option: str, value: str
) -> None:
    logs = alone.folder / "logs"
    ended = alone.run("rdzvrun", f"{option}={value}", f"--log-dir={logs}", REPORT)
    assert ended.returncode == 2, ended
    if value is LONG:
        # Before any server is asked, and with the prefix of every log line.
        assert f"{option} '{value[:77]}...' has {len(value)} characters" in ended.stderr
        assert "give at most 128" in ended.stderr
    else:
        assert f"{option} {value!r} has characters that are not allowed" in ended.stderr
        assert "use letters, digits and . _ : @ -" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not alone.all_reports()
    assert sorted(path.name for path in alone.folder.iterdir()) == ["reports"]


@pytest.mark.parametrize(
    ("what", "environ", "said"),
    [
        (["no-such.py"], {}, "the script 'no-such.py' is not on this node (looked in /"),
        ([""], {}, "the script '' is not on this node (looked in /"),
        ([LONG], {}, "is not on this node (looked in /"),
        (["finish/script.py"], {}, "the script 'finish/script.py' is not on this node"),
        (["--no-python", "no-such"], {}, "'no-such' is not a program on this node; give its path"),
        (["--no-python", "finish"], {}, "'finish' is not a program on this node; give its path"),
        ([REPORT], {"PYTHON_EXEC": "/no/python"}, "the interpreter '/no/python' is not on this"),
        ([REPORT], {"PYTHON_EXEC": ""}, "the interpreter '' is not on this node; set PYTHON_EXEC"),
    ],
)
def test_what_can_not_be_started_on_this_node_never_joins(
    alone: Cluster, what: list[str], environ: dict[str, str], said: str
) -> None:
    alone.finish()
    ended = alone.run("rdzvrun", ENDPOINT, f"--rdzv-id={JOB}", *what, environ=environ)
    assert ended.returncode == 2, ended
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("no-such.py", "looked in the working directory, which is gone"),
        ("--log-dir=logs no-such.py", "--log-dir=logs: the current directory is gone"),
    ],
)
def test_a_working_directory_that_is_gone_is_named(alone: Cluster, options: str, said: str) -> None:
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {BIN / 'rdzvrun'} {options}"
    node = alone.start("n1", ["bash", "-c", command], cwd=alone.folder)
    assert node.wait() == 2
    assert said in node.text
    assert "Traceback" not in node.text


# ------------------------------------------------------------------ the server


def test_a_server_that_is_not_there_is_tried_until_the_join_times_out(alone: Cluster) -> None:
    options = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"--rdzv-id={JOB}")
    standing = ("--rdzv-backend=rdzv", "--rdzv-conf=join_timeout=1")
    ended = alone.run("rdzvrun", *options, *standing, REPORT)
    assert ended.returncode == 75, ended
    *_, first, last = ended.stderr.splitlines()
    # Once when it was noticed, and once as the reason for giving up; no line from gRPC.
    assert ended.stderr.count("cannot reach") == 2
    assert "Task" not in ended.stderr
    assert f"cannot reach rdzvd at {options[0].partition('=')[2]}: connection refused" in first
    assert "retrying until a server admits this node, for at most " in first
    assert "no server admitted this node within 1 s" in last


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_data_directory_that_is_no_directory_is_refused(alone: Cluster, place: str) -> None:
    (alone.folder / "file").touch()
    data = alone.folder / place
    ended = alone.run("rdzvd", "--listen=127.0.0.1:0", f"--data-dir={data}")
    assert ended.returncode == 1, ended
    (line,) = ended.stderr.splitlines()
    assert line.startswith("rdzvd: ")
    assert str(data) in line


def test_a_second_server_is_refused_and_the_first_goes_on(c: Cluster) -> None:
    node = c.start_node("n1", nnodes="1")
    c.wait_for_round(0, workers=1)
    data = c.folder / "data"
    same_port = c.run("rdzvd", f"--listen={c.endpoint}", f"--data-dir={c.folder / 'other'}")
    same_data = c.run("rdzvd", "--listen=127.0.0.1:0", f"--data-dir={data}")
    why = {c.endpoint: "another program does already", str(data): "is in use by rdzvd pid"}
    for ended, named in ((same_port, c.endpoint), (same_data, str(data))):
        assert ended.returncode == 1, ended
        (line,) = ended.stderr.splitlines()
        assert line.startswith("rdzvd: ")
        assert named in line
        assert why[named] in line
    c.finish()
    assert node.wait() == 0


# ------------------------------------------------------------------ nodes that do not fit


def test_other_settings_are_refused_with_both_values_and_disturb_nobody(c: Cluster) -> None:
    first = c.start_node("n1", AT_ONCE, "--max-restarts=2", nnodes="1:2")
    c.wait_for_round(0, workers=1)
    second = c.start_node("n2", AT_ONCE, "--max-restarts=3", nnodes="1:3")
    assert second.wait() == 2
    assert f"n2 cannot join {JOB}" in second.text
    assert "max_nodes is 3 here and 2 in the job" in second.text
    assert "max_restarts is 3 here and 2 in the job" in second.text
    assert "or choose another --rdzv-id" in second.text
    assert len(c.all_reports()) == 1
    c.finish()
    assert first.wait() == 0
    assert "round 1" not in first.text


def test_a_node_id_in_use_is_waited_for_and_named(c: Cluster) -> None:
    at_once = (AT_ONCE, "--max-restarts=0")
    first = c.start_node("n1", *at_once, nnodes="1:2")
    (report,) = c.wait_for_round(0, workers=1)
    second = c.start_node("n1", *at_once, nnodes="1:2")
    said = f"node_id n1 is in use by 127.0.0.1 pid {first.process.pid}, "
    text_when(c, second, said)
    assert "each needs its own name (--node-id, or --node-rank under static)" in second.text
    assert "retrying until a server admits this node, for at most " in second.text
    assert alive(report["pid"])
    assert len(c.all_reports()) == 1
    first.process.terminate()
    first.wait()
    c.wait_for_round(1, workers=1)
    c.finish()
    assert second.wait() == 0
    assert "Traceback" not in second.text


def test_a_node_id_that_stays_in_use_ends_the_wait_with_75(c: Cluster) -> None:
    options = ("--rdzv-conf=last_call_timeout=0,join_timeout=1",)
    first = c.start_node("n1", *options, nnodes="1:2")
    c.wait_for_round(0, workers=1)
    second = c.start_node("n1", *options, nnodes="1:2")
    assert second.wait() == 75
    assert "no server admitted this node within 1 s: node_id n1 is in use by" in second.text
    c.finish()
    assert first.wait() == 0


def test_an_ended_run_is_not_begun_anew_where_that_is_refused(c: Cluster) -> None:
    c.finish()
    assert c.start_node("n1", nnodes="1").wait() == 0
    refused = c.start_node("n1", "--rdzv-conf=reuse=false", nnodes="1")
    assert refused.wait() == 1
    assert f"the last run of {JOB} has succeeded" in refused.text
    assert "choose another --rdzv-id" in refused.text
    assert c.start_node("n1", nnodes="1").wait() == 0


# ------------------------------------------------------------------ what goes between two rounds


def test_a_node_that_can_not_start_any_more_leaves_and_the_job_goes_on(c: Cluster) -> None:
    """Three nodes each lose something that they need; the restart needs all three."""
    needs = {
        "script": Path(shutil.copy(REPORT, c.folder / "script.py")),
        "python": c.folder / "python",
        "logs": c.folder / "logs-of-its-own",
    }
    needs["python"].symlink_to(sys.executable)
    options = ("--max-restarts=1", "--rdzv-conf=last_call_timeout=20")
    how = {
        "script": {"worker": str(needs["script"])},
        "python": {"environ": {"PYTHON_EXEC": str(needs["python"])}},
        "logs": {},
    }
    more = {"logs": (f"--log-dir={needs['logs']}",)}
    stays = c.start_node("a", *options, nnodes="1:4")
    nodes = {
        name: c.start_node(name, *options, *more.get(name, ()), nnodes="1:4", **how[name])  # type: ignore[arg-type]
        for name in needs
    }
    reports = c.wait_for_round(0, workers=4)
    needs["script"].unlink()
    needs["python"].unlink()
    shutil.rmtree(needs["logs"])
    needs["logs"].touch()
    os.kill(reports[0]["pid"], signal.SIGKILL)
    said = {
        "script": f"the script '{needs['script']}' is not on this node",
        "python": f"the interpreter '{needs['python']}' is not on this node",
        "logs": f"--log-dir={needs['logs']}: {needs['logs']} is not a directory; give another",
    }
    for name, node in nodes.items():
        assert node.wait() == 1
        assert said[name] in node.text.splitlines()[-1]
        assert "Traceback" not in node.text

    def alone() -> list[dict[str, str]]:
        return [r for r in c.all_reports() if r["WORLD_SIZE"] == "1"]

    (report,) = c.wait_until("one node goes on alone", alone)
    assert report["TORCHELASTIC_RESTART_COUNT"] == "1"
    status = c.status()
    assert (status.state, status.restarts) == ("running", 1)
    gone = {n.node_id: n for n in status.nodes if n.node_id != "a"}
    for name in needs:
        assert gone[name].state == "left"
        assert said[name] in status.reason.by_node[name]
    c.finish()
    assert stays.wait() == 0


def test_a_program_without_its_interpreter_fails_the_job_in_its_own_words(c: Cluster) -> None:
    program = c.folder / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    node = c.start_node("n1", "--no-python", nnodes="1", worker=str(program))
    assert node.wait() == 1
    assert f"'{program}': No such file or directory; the file exists, so the" in node.text
    assert c.status().state == "failed"


# ------------------------------------------------------------------ workers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("garbage", "the error file is not torchelastic's JSON: 'garbage'"),
        ("", "the error file is empty"),
        ('{"message": "no way"}', "no way"),
        ('{"message": {"message": {"a": [1]}, "extraInfo": 5}}', "{'a': [1]}"),
        ('["message"]', "the error file is not torchelastic's JSON"),
        ("[" * 100_000, "the error file is not torchelastic's JSON"),
    ],
)
def test_an_error_file_of_any_kind_is_no_obstacle(alone: Cluster, text: str, said: str) -> None:
    ended = alone.run("rdzvrun", REPORT, f"error={text}", "exit=3")
    assert ended.returncode == 1, ended
    assert said in ended.stderr
    assert "exit code 3" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_job_that_is_not_known_is_named_by_every_command(c: Cluster) -> None:
    for command in ("status", "events", "stop", "restart"):
        ended = c.run("rdzvctl", f"--server={c.endpoint}", command, "nobody")
        assert ended.returncode == 1
        (line,) = ended.stderr.splitlines()
        assert line.startswith("rdzvctl: ")
        assert "nobody" in line
