"""rdzvctl submit: what its options and its file mean, what it refuses, and what it sends."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import control_samples
import grpc
import pytest
from control_samples import give_reason
from fake_control import Capture, Ctl, FakeControl

import rdzv.client
from rdzv.core.model import ScaleUp
from rdzv.ctl import job_request
from rdzv.ctl.__main__ import run
from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    StoreRefusedError,
)
from rdzv.v1 import rdzv_pb2 as pb

HERE = job_request.CallerContext("/home/ada/gpt", {"TOKEN": "s3cret", "HOME": "/home/ada"})


class SubmitControl(FakeControl):
    """Accepts submissions, and records the requests; then a run that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[pb.SubmitJobRequest] = []
        self.cuts = 0
        """How many requests are left without an answer."""
        self.ends_as = "succeeded"
        self.no_progress = False
        self.exited: int | None = None
        """The exit code of the worker whose failure ended the run, if one did."""
        self.log_error: grpc.StatusCode | None = None
        self.logs_read: list[pb.ReadLogsRequest] = []
        self.meanwhile: list[tuple[str, str, int]] = []
        self.watched = threading.Event()

    def SubmitJob(  # noqa: N802
        self, request: pb.SubmitJobRequest, context: grpc.ServicerContext
    ) -> pb.JobStatus:
        self.requests.append(request)
        self._misbehave(context)
        if self.cuts:
            self.cuts -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        status = control_samples.joining()
        status.rdzv_id, status.run = request.rdzv_id, request.run
        del status.nodes[:]
        give_reason(status, "needs 2 nodes with gpu=h100, and no rdzv-agent is connected")
        status.submission.submitted_by = request.submitted_by
        status.submission.args.extend(request.spec.args)
        status.submission.env_names.extend(one.name for one in request.spec.env)
        self.jobs[request.rdzv_id] = status
        return status

    def WatchJob(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.JobStatus]:
        status = pb.JobStatus()
        status.CopyFrom(self.jobs[request.rdzv_id])
        yield status
        self.watched.set()
        for reason in self.meanwhile:
            give_reason(status, *reason)
            yield status
        give_reason(status, "so it was told")
        status.state = self.ends_as
        status.no_progress = self.no_progress
        if self.exited is not None:
            status.ended_by_failure = True
            status.last_failure.root_cause.exit_code = self.exited
        if not self.ends_as:
            status.run = "another"
        yield status

    def ReadLogs(  # noqa: N802
        self, request: pb.ReadLogsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.LogLines]:
        self.logs_read.append(request)
        self.watched.wait(100)
        if self.log_error is not None:
            context.abort(self.log_error, "no more readers")
        yield pb.LogLines(node_id="n1", rank=0, data=b"step 1\n", run=request.run)


@pytest.fixture
def control() -> SubmitControl:
    return SubmitControl()


@pytest.fixture(autouse=True)
def _no_defaults_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def read(*words: str, caller: job_request.CallerContext = HERE) -> job_request.Request:
    return job_request.read(words, caller)


def refusal(*words: str, caller: job_request.CallerContext = HERE) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        job_request.read(words, caller)
    return str(refused.value)


# ------------------------------------------------------------------------------ the words


def test_a_job_is_what_rdzvrun_would_run() -> None:
    found = read(
        *("--rdzv-id=night", "--nnodes=2:4", "--nproc_per_node", "8", "--max-restarts=3"),
        *("--rdzv-conf=scale_up=after:60", "-t", "3", "--", "train.py", "--lr", "1"),
    )
    assert found.rdzv_id == "night"
    assert (found.settings.min_nodes, found.settings.max_nodes) == (2, 4)
    assert (found.settings.scale_up, found.settings.scale_up_after_ms) == (ScaleUp.AFTER, 60_000)
    assert found.spec.args == (
        *("--nnodes=2:4", "--nproc_per_node", "8", "--max-restarts=3"),
        *("--rdzv-conf=scale_up=after:60", "-t", "3", "--", "train.py", "--lr", "1"),
    )
    assert (found.spec.local_world_size, found.spec.gpus_per_node) == (8, None)
    assert found.spec.chdir == "/home/ada/gpt"
    assert (found.spec.env, found.spec.labels, found.spec.priority) == ((), (), 0)
    assert found.notes == ()


def test_what_is_not_rdzvruns_is_not_among_its_arguments() -> None:
    found = read(
        *("--env", "A=b=c", "--env=TOKEN", "--labels=zone=a,gpu=h100", "--gpus-per-node=2"),
        *("--priority", "-5", "--chdir", "src", "--rdzv-id", "night", "--nproc-per-node=gpu"),
        *("--server=h:1", "--timeout=2", "-o", "json", "--role=r", "t.py", "--env", "X"),
    )
    assert found.spec.args == ("--nproc-per-node=gpu", "--role=r", "t.py", "--env", "X")
    assert found.spec.env == (("A", "b=c"), ("TOKEN", "s3cret"))
    assert found.spec.labels == (("gpu", "h100"), ("zone", "a"))
    assert (found.spec.gpus_per_node, found.spec.priority) == (2, -5)
    assert found.spec.local_world_size == 0
    assert found.spec.chdir == "/home/ada/gpt/src"
    assert found.connection == {"server": "h:1", "timeout_s": 2.0}
    assert found.output == "json"


def test_two_dashes_may_be_left_out() -> None:
    assert read("--nnodes", "2", "t.py", "-x").spec.args == ("--nnodes", "2", "t.py", "-x")
    assert read("--", "t.py").spec.args == ("--", "t.py")


def test_abbreviations_are_torchruns() -> None:
    """`--env` does not make `--e` ambiguous."""
    args = read("--e", "null", "--nn", "3", "t").spec.args
    assert [arg.replace("_", "-") for arg in args] == [
        *("--event-log-handler", "null"),
        *("--nnodes", "3", "t"),
    ]


def test_logs_go_below_the_working_directory_of_the_job() -> None:
    """The daemon that launches it has its own."""
    assert read("--log-dir", "logs", "t").spec.args[0] == "--log-dir=/home/ada/gpt/logs"
    assert read("--log-dir=/var/log/x", "t").spec.args[0] == "--log-dir=/var/log/x"
    words = ("--log-dir=logs", "--chdir=/srv", "t")
    assert read(*words).spec.args[0] == "--log-dir=/srv/logs"


@pytest.mark.parametrize(
    ("words", "stem"),
    [
        (["a/train.py"], "train"),
        (["-m", "pkg.finetune"], "finetune"),
        (["--no-python", "/bin/bash"], "bash"),
        (["My Train (2).py"], "My-Train-2"),
        (["...py"], "job"),
        (["ü.py"], "job"),
        (["x" * 300], "x" * 64),
    ],
)
def test_a_job_without_a_name_is_named_after_its_script(words: list[str], stem: str) -> None:
    names = {read(*words).rdzv_id for _ in range(2)}
    for name in names:
        head, dash, digits = name.rpartition("-")
        assert (head, dash, len(digits)) == (stem, "-", 4)
        assert int(digits, 16) >= 0


def test_every_request_has_a_uid_of_its_own() -> None:
    assert len({read("--rdzv-id=a", "t").run for _ in range(3)}) == 3


def test_the_working_directory_has_the_name_that_the_caller_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    assert job_request.CallerContext.here().directory == str(tmp_path / "link")
    monkeypatch.setenv("PWD", "/nowhere")
    assert job_request.CallerContext.here().directory == str(tmp_path / "real")
    (tmp_path / "real").rmdir()
    assert job_request.CallerContext.here().directory == ""
    assert "the working directory is gone" in refusal("t", caller=job_request.CallerContext("", {}))
    assert read("--chdir=/srv", "t", caller=job_request.CallerContext("", {})).spec.chdir == "/srv"


# ------------------------------------------------------------------------------ refusals

MOST_BYTES = 128 * 1024

REFUSED = [
    ("", "what is to run is missing; give a script after the flags, or `script` in a --file"),
    ("--nnodes=2 --", "what is to run is missing; give a script"),
    ("--standalone t", "--standalone is not for submitted jobs: "),
    ("--stand t", "--standalone is not for submitted jobs: "),
    ("--rdzv-endpoint=h t", "name it with --server or RDZV_SERVER"),
    ("--rdzv_backend c10d t", "--rdzv-backend is not for submitted jobs: "),
    ("--node-id=n t", "choose nodes with --labels"),
    ("--node-rank=0 t", "the server assigns the ranks; leave it out"),
    ("--master-addr=h t", "--master-addr is not for submitted jobs: "),
    ("--master-port=1 t", "--master-port is not for submitted jobs: "),
    ("--local-addr=h t", "every node knows its own address; leave it out"),
    ("--user=\t t", "has characters that cannot be printed; leave them out"),
    (f"--user={'u' * 256} t", "has 256 characters; give at most 255"),
    ("--nope t", "--nope is not a flag; see rdzvctl submit --help"),
    ("--output=jsn t", "--output=jsn is not one of text, json, yaml; did you mean `json`?"),
    ("--priority x t", "--priority=x: give a whole number from -1000000 to 1000000"),
    ("--priority=1000001 t", "--priority=1000001: give a whole number from -1000000 to 1000000"),
    ("--gpus-per-node=-1 t", "--gpus-per-node=-1: give a whole number from 0 to 1024"),
    ("--labels=gpu t", "--labels: 'gpu' is not NAME=VALUE; give, for example, gpu=h100,zone=a"),
    (
        "--labels=/x=1 t",
        "--labels '/x' has characters that are not allowed; use letters",
    ),
    ("--labels=a=1,a=2 t", "--labels 'a' is given twice; give it once"),
    ("--labels=a=\x1b t", "--labels: a '\\x1b' has characters that cannot be printed"),
    ("--env =1 t", "--env: there is no name before the `=`; give NAME=VALUE, or only NAME"),
    ("--env A-B=1 t", "--env: variable 'A-B' has characters that are not allowed"),
    ("--env NOPE t", "--env NOPE: it is not set here; set it, or give NOPE=VALUE"),
    ("--env A=1 --env A=2 t", "--env A is given twice; leave one of them out"),
    ("--env WORLD_SIZE=2 t", "variable WORLD_SIZE: it is different in every worker and round"),
    ("--env CUDA_VISIBLE_DEVICES=0 t", "say how many with --gpus-per-node"),
    ("--chdir= t", "--chdir is empty; name a folder, or leave it out"),
    ("--timeout=0 t", "--timeout=0: give a number of seconds from 0.001 to 86400"),
    ("--timeout=nan t", "--timeout=nan: give a number of seconds"),
    (
        "--rdzv-id=.x t",
        "--rdzv-id '.x' has characters that are not allowed; use letters",
    ),
    ("--preemption-file=x t", "every node has its own, as [preemption] in agent.toml"),
    ("-mo json t", "-mo mixes flags of rdzvrun and of rdzvctl; write them apart"),
    ("--follow -o json t", "--follow shows the workers' output, and -o json a document"),
    ("--file=nowhere.toml", "--file=/home/ada/gpt/nowhere.toml: it cannot be read: No such file"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_makes_no_sense_is_refused_with_the_remedy(words: str, message: str) -> None:
    assert message in refusal(*(word for word in words.split(" ") if word))


def test_every_flag_that_is_refused_is_there_to_be_refused() -> None:
    known = {action.dest for action in job_request.make_parser().options.values()}
    assert set(job_request.REFUSED) <= known


def test_no_value_of_a_variable_is_shown() -> None:
    for words in (["--env=TOKEN=\0s3cret"], ["--env=A=s3cret\udcff"], ["--env=RANK=s3cret"]):
        assert "s3cret" not in refusal(*words, "t")
    large = f"--env=A=s3cret{'x' * MOST_BYTES}"
    assert "s3cret" not in refusal(large, "t")


@pytest.mark.slow
def test_an_environment_has_bounds() -> None:
    names = [f"--env=V{number}=" for number in range(1_000)]
    assert len(read(*names, "t").spec.env) == 1_000
    assert "1001 are too many; give at most 1000" in refusal(*names, "--env=W=", "t")
    fits = f"--env=A={'x' * (MOST_BYTES - 1)}"
    assert read(fits, "t").spec.env
    assert "131073 bytes are too many; give at most 131072" in refusal(fits + "x", "t")
    assert "131073 bytes" in refusal("--env=A=" + "ü" * (MOST_BYTES // 2), "t")


def test_arguments_have_bounds_and_can_travel() -> None:
    assert read("t", "x" * (MOST_BYTES - 1))
    assert "arguments 131073 bytes are too many" in refusal("t", "x" * MOST_BYTES)
    assert "argument '\\udcff' cannot be used: it is not UTF-8" in refusal("t", "\udcff")
    assert "--chdir '/\\udcff' cannot be used: it is not UTF-8" in refusal("--chdir=/\udcff", "t")


def test_what_has_no_effect_is_noted() -> None:
    caller = job_request.CallerContext("/", {"PET_NNODES": "2", "PET_TEE": "3"})
    found = read("--rdzv-conf=join_timeot=9,timeout=9", "t", caller=caller)
    assert found.notes == (
        "--rdzv-conf: ignoring unknown key join_timeot; did you mean `join_timeout`?",
        "PET_NNODES, PET_TEE in this environment have no effect here; give flags",
    )
    assert found.settings.min_nodes == 1


# ------------------------------------------------------------------------------ the file

JOB = """
rdzv_id = "night"
nnodes = "2:4"
nproc-per-node = 8
max_restarts = 3
module = true
virtual_local_rank = false
chdir = "src"
script = "pkg.train"
args = ["--lr", "1"]
priority = 5
gpus_per_node = 4
env_from = ["TOKEN"]
[rdzv_conf]
join_timeout = 60
reuse = false
[env]
A = "1"
B = "2"
[labels]
gpu = "h100"
"""


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return f"--file={path}"


def test_a_file_says_all_of_it(tmp_path: Path) -> None:
    found = read(file(tmp_path, JOB))
    assert found.rdzv_id == "night"
    assert found.spec.args == (
        *("--nnodes=2:4", "--nproc-per-node=8", "--max-restarts=3", "--module"),
        *("--rdzv-conf=join_timeout=60,reuse=false", "pkg.train", "--lr", "1"),
    )
    assert found.spec.env == (("A", "1"), ("B", "2"), ("TOKEN", "s3cret"))
    assert found.spec.labels == (("gpu", "h100"),)
    assert (found.spec.priority, found.spec.gpus_per_node) == (5, 4)
    assert found.spec.chdir == str(tmp_path / "src")
    assert found.settings.join_timeout_ms == 60_000


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    found = read(
        *(file(tmp_path, JOB), "--nnodes", "3", "--env=A=9", "--chdir=x", "--labels=zone=a"),
        *("--rdzv-id=day", "--priority=-1", "--rdzv-conf=join_timeout=5", "other.train"),
    )
    assert found.rdzv_id == "day"
    assert found.spec.args == (
        *("--nproc-per-node=8", "--max-restarts=3", "--module", "--nnodes", "3"),
        *("--rdzv-conf=join_timeout=5", "other.train"),
    )
    assert dict(found.spec.env) == {"A": "9", "B": "2", "TOKEN": "s3cret"}
    assert found.spec.labels == (("zone", "a"),)
    assert (found.spec.chdir, found.spec.priority) == ("/home/ada/gpt/x", -1)


def test_a_file_without_a_folder_leaves_the_callers(tmp_path: Path) -> None:
    assert read(file(tmp_path, 'script = "t"')).spec.chdir == "/home/ada/gpt"


def test_a_script_may_begin_with_a_dash(tmp_path: Path) -> None:
    assert read(file(tmp_path, 'script = "-t.py"')).spec.args == ("--", "-t.py")


BAD_FILES = [
    ("nodes = 2", "`nodes` is unknown; did you mean `nnodes`?"),
    ("zzzz = 2", "`zzzz` is unknown; known: args, chdir, "),
    ("training_script = 't'", "`training_script` is unknown"),
    ("follow = true", "`follow` is unknown"),
    ("server = 'h'", "`server` is unknown"),
    ("standalone = true", "`standalone` is not for submitted jobs; "),
    ("nnodes = true", "`nnodes` True is neither text nor a number; write it as one"),
    ("nnodes = [2, 4]", "`nnodes` [2, 4] is neither text nor a number"),
    ("nnodes = 2\nn = 1", "`n` is unknown"),
    ("rdzv-id = 'a'\nrdzv_id = 'b'", "`rdzv_id` is given twice, also as `rdzv-id`; keep one"),
    ("module = 1", "`module` 1 is neither true nor false; give one of them"),
    ("script = 3", "`script` 3 is not a script; give its path, as text"),
    ("script = ''", "`script` '' is not a script"),
    ("args = 'x'", '`args` is not a list of strings; write args = ["...", "..."]'),
    ("args = ['x']", "`args` need a script; add `script`, or leave them out"),
    ("script = 't'\nargs = [1]", "`args` is not a list of strings"),
    ("env = ['A']", '`env` is not a table; write NAME = "VALUE" lines below [env]'),
    ("[env]\nA = 31337", "`env.A` is not a string; put its value in quotes"),
    ("env_from = 'A'", "`env_from` is not a list of strings"),
    ("script='t'\nenv_from = ['NOPE']", "env_from: NOPE: it is not set here"),
    ("script='t'\n[env]\n'A-B' = '1'", "variable 'A-B' has characters that are not allowed"),
    ("[labels]\na = 'x,y'", "`labels.a` 'x,y' cannot be used; give text without commas"),
    ("[labels]\na = ['x']", "`labels.a` ['x'] cannot be used"),
    ("script = 't'\nnnodes = '4:2'", "--nnodes=4:2: the minimum 4 is above the maximum 2"),
    ("script = 't'\npriority = 1.5", "--priority=1.5: give a whole number from -1000000"),
    ("= 3", "job.toml: it is not TOML: "),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=[row[0] for row in BAD_FILES])
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    said = refusal(file(tmp_path, text))
    assert message in said
    assert "31337" not in said


@pytest.mark.slow
def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"script = '\xff'")
    assert "is not TOML" in refusal(f"--file={path}")
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    assert "is larger than 1048576 bytes" in refusal(f"--file={path}")
    assert "cannot be read: Is a directory" in refusal(f"--file={tmp_path}")


# ------------------------------------------------------------------------------ the command


def test_a_job_is_handed_over(control: SubmitControl, server: str, ctl: Ctl) -> None:
    words = "submit --nnodes=2 --env=A=s3cret --labels=gpu=h100 --gpus-per-node=2 --rdzv-id=night"
    captured = ctl(*words.split(), "--", "train.py")
    assert captured.err == ""
    assert captured.out == (
        "night  is submitted\n"
        "needs 2 nodes with gpu=h100, and no rdzv-agent is connected\n"
        "  follow it    rdzvctl logs -f night\n"
        "  see it       rdzvctl status -w night\n"
    )
    (request,) = control.requests
    assert (request.rdzv_id, request.settings.min_nodes) == ("night", 2)
    assert list(request.spec.args) == ["--nnodes=2", "--", "train.py"]
    assert [(one.name, one.value) for one in request.spec.env] == [("A", "s3cret")]
    assert [(one.name, one.value) for one in request.spec.labels] == [("gpu", "h100")]
    assert (request.spec.gpus_per_node, request.spec.local_world_size) == (2, 1)
    assert request.spec.chdir == str(Path.cwd())
    assert " at " in request.submitted_by


@pytest.mark.slow
def test_gpus_that_are_not_named_are_not_sent(control: SubmitControl, server: str) -> None:
    assert run(["submit", "t"]) == run(["submit", "--gpus-per-node=0", "t"]) == 0
    left_out, none = control.requests
    assert not left_out.spec.HasField("gpus_per_node")
    assert none.spec.HasField("gpus_per_node")


@pytest.mark.slow
def test_the_hint_names_the_server_that_the_line_names(
    server: str, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RDZV_SERVER")
    assert (
        f"rdzvctl --server={server} logs -f night\n"
        in ctl("submit", f"--server={server}", "--rdzv-id=night", "t").out
    )
    assert run(["--server", server, "submit", "t"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("output", ["json", "yaml"])
def test_programs_get_the_job(server: str, ctl: Ctl, output: str) -> None:
    import yaml

    text = ctl("submit", "-o", output, "--env=A=s3cret", "--rdzv-id=night", "t").out
    document = yaml.safe_load(text)
    assert document == (json.loads(text) if output == "json" else document)
    assert (document["version"], document["rdzv_id"], document["state"]) == (1, "night", "joining")
    assert document["submission"]["env_names"] == ["A"]
    assert "s3cret" not in text


def test_a_dry_run_sends_nothing_and_shows_no_value(
    control: SubmitControl, server: str, ctl: Ctl
) -> None:
    words = ["--dry-run", "--env=A=s3cret", "--nnodes=2:4", "--labels=gpu=h100", "--rdzv-id=night"]
    text = ctl("submit", *words, "--nproc-per-node=gpu", "--priority=2", "t x.py", "y").out
    assert text == (
        "night  would be submitted; nothing was sent\n"
        "  nodes        2:4\n"
        "  workers      as many as each node counts on each node\n"
        "  restarts     0\n"
        "  runs         --nnodes=2:4 --nproc-per-node=gpu 't x.py' y\n"
        f"  in           {Path.cwd()}\n"
        "  environment  A (values are not shown)\n"
        "  labels       gpu=h100\n"
        "  priority     2\n"
    )
    document = json.loads(ctl("submit", *words, "-o", "json", "t").out)
    assert list(document) == ["version", "rdzv_id", "settings", "spec"]
    assert document["spec"]["env_names"] == ["A"]
    assert "env" not in document["spec"]
    assert control.requests == []


def test_what_is_wrong_is_one_line_and_nothing_is_sent(
    control: SubmitControl, server: str, capsys: Capture, ctl: Ctl
) -> None:
    captured = ctl("submit", "--nnodes=x", "t", code=2)
    assert captured.out == ""
    assert captured.err == (
        "rdzvctl: --nnodes=x is not a number of nodes; give N or MIN:MAX, e.g. 2:4\n"
    )
    assert run(["submit", "--role=\x1b[2J", "t"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    assert control.requests == []


@pytest.mark.slow
def test_help_shows_rdzvruns_flags_but_not_those_that_are_refused(ctl: Ctl) -> None:
    text = ctl("submit", "--help").out
    for name in ("--env", "--gpus-per-node", "--follow", "--nproc-per-node", "--numa-binding"):
        assert f"  {name}" in text, name
    for name in job_request.REFUSED:
        assert f"--{name.replace('_', '-')} " not in text, name
    assert run(["submit", "-h"]) == 0


@pytest.mark.slow
def test_help_of_the_script_is_the_scripts(control: SubmitControl, server: str) -> None:
    assert run(["submit", "t.py", "--help"]) == 0
    assert list(control.requests[0].spec.args) == ["t.py", "--help"]


@pytest.mark.slow
def test_a_store_that_refuses_is_not_asked_again(
    control: SubmitControl, server: str, ctl: Ctl
) -> None:
    control.error = StoreRefusedError("the disk is full; nothing was written")
    assert (
        "the disk is full; nothing was written; nothing was submitted"
        in ctl("submit", "--rdzv-id=night", "t", code=75).err
    )
    assert len(control.requests) == 1


# ------------------------------------------------------------------------------ bad connections


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat a request ten times as fast."""
    monkeypatch.setattr(rdzv.client, "SUBMIT_RETRY_S", 0.05)


class PauseClock:
    """Time that passes while a client pauses between two attempts, and at no other moment."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, pause_s: float) -> None:
        self._now_s += pause_s


@pytest.fixture
def three_tries(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an option with which a request is tried three times, with 20 s or more for each."""
    monkeypatch.setattr(rdzv.client, "time", PauseClock())
    monkeypatch.setattr(rdzv.client, "SUBMIT_RETRY_S", 40.0)
    return "--timeout=100"


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_lost_connection_repeats_the_same_request(control: SubmitControl, server: str) -> None:
    control.cuts = 2
    assert run(["submit", "--rdzv-id=night", "t"]) == 0
    assert len(control.requests) == 3
    assert len({request.SerializeToString(deterministic=True) for request in control.requests}) == 1


@pytest.mark.slow
def test_a_request_that_may_have_arrived_says_so(
    control: SubmitControl, server: str, three_tries: str, ctl: Ctl
) -> None:
    control.cuts = 1_000
    assert (
        "it is unknown whether night was submitted"
        in ctl("submit", three_tries, "--rdzv-id=night", "t", code=75).err
    )
    assert len(control.requests) == 3
    control.cuts, control.hangs = 0, True
    said = ctl("submit", "--timeout=0.2", "--rdzv-id=night", "t", code=75).err
    assert "no answer within 0.2 s" in said
    assert "is unknown" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "why"),
    [("127.0.0.1:1", "connection refused"), ("no-such-host.invalid", "no such host name")],
)
def test_a_server_that_cannot_be_reached_got_nothing(server: str, why: str, ctl: Ctl) -> None:
    said = ctl("submit", f"--server={server}", "t", code=75).err
    assert why in said
    assert "nothing was submitted" in said
    assert "is unknown" not in said


@pytest.mark.slow
def test_who_got_it_and_did_not_answer_may_have_done_it_whoever_is_asked_next(
    control: SubmitControl, server: str, three_tries: str, ctl: Ctl
) -> None:
    control.cuts = 1_000
    words = ["submit", f"--server={server},127.0.0.1:1", three_tries, "--rdzv-id=night", "t"]
    assert "it is unknown whether night was submitted" in ctl(*words, code=75).err
    control.cuts = 1
    assert run(words) == 0


@pytest.mark.slow
def test_a_store_that_is_away_is_waited_for(
    control: SubmitControl, server: str, three_tries: str, ctl: Ctl
) -> None:
    control.error = RendezvousConnectionError("the store is away: disk full")
    assert "the store is away: disk full" in ctl("submit", three_tries, "t", code=75).err
    assert len(control.requests) == 3


@pytest.mark.slow
def test_an_older_server_is_told_apart_at_once(
    control: SubmitControl, server: str, ctl: Ctl
) -> None:
    control.error = grpc.StatusCode.UNIMPLEMENTED
    said = ctl("submit", "t", code=75).err
    assert "not an rdzv server, or an older one" in said
    assert "is unknown" not in said
    assert len(control.requests) == 1


# ------------------------------------------------------------------------------ --follow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "no_progress", "exited", "code"),
    [
        ("succeeded", False, None, 0),
        ("failed", False, 5, 5),
        ("stopped", False, None, 3),
        ("failed", True, 5, 93),
    ],
)
def test_followed_to_its_end(
    control: SubmitControl,
    server: str,
    capfdbinary: pytest.CaptureFixture[bytes],
    state: str,
    no_progress: bool,
    exited: int | None,
    code: int,
) -> None:
    control.ends_as, control.no_progress, control.exited = state, no_progress, exited
    assert run(["submit", "--follow", "--rdzv-id=night", "--exit-code=root-cause", "t"]) == code
    captured = capfdbinary.readouterr()
    assert captured.out == b"[rank 0] step 1\n"
    assert captured.err.decode().splitlines() == [
        "night  is submitted",
        "needs 2 nodes with gpu=h100, and no rdzv-agent is connected",
        "rdzvctl: night is joining: needs 2 nodes with gpu=h100, and no rdzv-agent is connected",
        f"rdzvctl: night has {state}: so it was told",
    ]
    assert [request.run for request in control.logs_read] == [control.requests[0].run]
    assert control.logs_read[0].follow


@pytest.mark.slow
def test_what_it_waits_for_is_told_once_however_time_goes_on(
    control: SubmitControl, server: str, ctl: Ctl
) -> None:
    waits = [("n1 failed after 5 s", "gives up in", ms) for ms in (9_000, 8_000, 7_000)]
    control.meanwhile = [*waits, ("n1 failed after 6 s", "gives up in", 6_000)]
    told = [
        line
        for line in ctl("submit", "--follow", "--rdzv-id=night", "t").err.splitlines()
        if "gives up" in line
    ]
    assert told == [
        "rdzvctl: night is joining: n1 failed after 5 s; gives up in 9.0 s",
        "rdzvctl: night is joining: n1 failed after 6 s; gives up in 6.0 s",
    ]


@pytest.mark.slow
def test_logs_that_can_not_be_shown_end_nothing(
    control: SubmitControl, server: str, ctl: Ctl
) -> None:
    control.log_error = grpc.StatusCode.RESOURCE_EXHAUSTED
    said = ctl("submit", "--follow", "--rdzv-id=night", "t").err
    assert "no more of its output can be shown: " in said
    assert "night has succeeded" in said


@pytest.mark.slow
def test_another_run_of_that_name_is_not_taken_for_this_one(
    control: SubmitControl, server: str, ctl: Ctl
) -> None:
    control.ends_as = ""
    assert (
        "another run of night has begun"
        in ctl("submit", "--follow", "--rdzv-id=night", "t", code=1).err
    )


@pytest.mark.slow
def test_ctrl_c_leaves_it_running(
    control: SubmitControl, server: str, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rdzv.ctl import watch

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.StateReports, "report", interrupted)
    said = ctl("submit", "--follow", "--rdzv-id=night", "t", code=130).err.splitlines()[-1]
    assert said == (
        "rdzvctl: night continues; `rdzvctl logs -f night` shows its output, `rdzvctl stop "
        "night` stops it"
    )


def test_a_name_of_any_length_is_not_shown_whole() -> None:
    long = "x" * 10_000
    for words in ((f"--rdzv-id={long}", "t"), (f"--rdzv-id={long} y", "t")):
        assert len(refusal(*words)) < 250
    with pytest.raises(InvalidRequestError, match="10000 characters; give at most 128"):
        read(f"--rdzv-id={long}", "t")


# ------------------------------------------------------------------------------ how it connects


def test_how_the_server_is_reached_may_stand_after_the_name_too() -> None:
    found = read(
        "--tls-ca=/ca.pem", "--tls-cert", "c.pem", "--tls_key=k.pem", "--token-file=t", "t"
    )
    assert {field: str(path) for field, path in found.connection.items()} == {
        "ca": "/ca.pem",
        "cert": "c.pem",
        "key": "k.pem",
        "token_file": "t",
    }
    # They are this command's: the nodes have their own.
    assert found.spec.args == ("t",)
    assert read("t", "--tls-ca=/ca.pem").connection == {}


@pytest.mark.slow
def test_a_submission_is_sent_with_the_credentials_of_its_line(server: str, ctl: Ctl) -> None:
    assert "/nowhere/ca.pem" in ctl("submit", "--tls-ca=/nowhere/ca.pem", "t.py", code=2).err
