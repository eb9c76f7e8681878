"""rdzvrun's command line: torchrun's options, their defaults, and what is wrong with bad ones."""

import argparse
import logging
import os
import re
import socket
import subprocess
import sys
import types
from pathlib import Path
from signal import Signals

import grpc
import pytest
from tls_files import Files

from rdzv.agent.cli.options import parse_launch
from rdzv.agent.launch.launch import Launch, Output
from rdzv.agent.launch.numa import NumaBinding
from rdzv.client import Endpoint
from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import flags
from rdzv.launch_options.declared_flags import CONF
from rdzv.structs import replace
from rdzv.transport.channels import BY_NODE
from rdzv.transport.node_stream import error_from_status

HEAD = ("--rdzv-endpoint=head", "--rdzv-id=job-7")


@pytest.fixture(autouse=True)
def _no_inherited_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHON_EXEC", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


def launch(*argv: str) -> Launch:
    return parse_launch([*argv, "train.py"])[0]


def endpoints(*argv: str) -> list[Endpoint]:
    return list(parse_launch([*argv, "train.py"])[1].endpoints)


# ------------------------------------------------------------------ defaults


@pytest.mark.slow
def test_without_options_one_worker_runs_with_a_server_of_its_own() -> None:
    found, meeting = parse_launch(["train.py"])
    assert (meeting.endpoints, meeting.host_at) == ((), None)
    assert (found.script, found.args) == ("train.py", ())
    assert (found.module, found.no_python, found.refuse_reuse) == (False, False, False)
    assert (found.python, found.role, found.topology, found.local_addr) == (
        sys.executable,
        "default",
        "",
        "",
    )
    assert found.output == Output(redirects={0: 0}, tee={0: 0})
    assert found.job.settings == Settings(
        min_nodes=1,
        max_nodes=1,
        max_restarts=0,
        join_timeout_ms=600_000,
        last_call_timeout_ms=30_000,
        scale_up=ScaleUp.EAGER,
        restart_window_ms=0,
    )
    assert found.job.local_world_size == 1
    assert found.job.shutdown_timeout_ms == 30_000
    assert found.job.failure_stop_timeout_ms == 5_000
    assert found.job.server_timeout_ms == 600_000


@pytest.mark.slow
def test_credentials_are_for_a_standing_rdzvd(tmp_path: Path) -> None:
    """A server that a node brings along has no TLS, whatever the environment says."""
    files = Files(tmp_path / "certs")
    node = files.node("n1")
    environ = {"RDZV_TLS_CA": str(files.ca), "RDZV_TOKEN": "abc"}
    shown = (f"--tls-cert={node.cert}", f"--tls-key={node.key}")
    standing = ("--rdzv-endpoint=head", "--rdzv-id=a", "--nnodes=2")
    found = parse_launch([*standing, *shown, "train.py"])[1].credentials(environ)
    assert found == replace(node, token="abc")
    for own in (
        ("--standalone",),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:1", "--nnodes=2"),
        ("--rdzv-backend=static", "--node-rank=0", "--nnodes=2"),
    ):
        assert parse_launch([*own, *shown, "train.py"])[1].credentials(environ) == BY_NODE
    with pytest.raises(InvalidRequestError, match="without --tls-ca"):
        parse_launch([*standing, *shown, "train.py"])[1].credentials({})


def test_a_job_of_its_own_has_a_name_of_its_own() -> None:
    names = {launch().job.rdzv_id for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("standalone-") for name in names)


@pytest.mark.slow
def test_the_snapshot_is_where_the_workers_see_it(tmp_path: Path) -> None:
    assert launch().snapshot is None
    given = ("--no-progress-restarts=3", "--snapshot=saved/last.pt")
    found = launch(*given)
    assert found.snapshot == Path.cwd() / "saved" / "last.pt"
    assert found.job.settings.no_progress_restarts == 3
    placed, _ = parse_launch([*given, "train.py"], environ={}, chdir=tmp_path)
    assert placed.snapshot == tmp_path / "saved" / "last.pt"


@pytest.mark.slow
def test_workers_are_fenced_only_if_that_is_asked_for() -> None:
    assert launch(*HEAD).hang_timeout is None
    assert launch(*HEAD, "--hang-timeout=600").hang_timeout == HangTimeout(600_000)
    assert launch(*HEAD).job.fence_after_ms == 0
    assert launch(*HEAD, "--fence-after=3.5").job.fence_after_ms == 3_500
    assert launch("--rdzv-backend=c10d", "--rdzv-endpoint=head", "--fence-after=3").job


@pytest.mark.parametrize("alone", [(), ("--standalone",)])
def test_a_node_that_can_not_be_cut_off_has_no_fence(alone: tuple[str, ...]) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"--fence-after=3 has no effect here: .* its own"
    ):
        launch(*alone, "--fence-after=3")


def test_word_of_a_preemption_comes_from_where_the_command_is_given() -> None:
    assert launch().preemption_file is None
    assert launch("--preemption-file=gone").preemption_file == Path.cwd() / "gone"
    assert launch("--preemption-file=/run/gone").preemption_file == Path("/run/gone")


def test_nodes_of_one_machine_have_different_names() -> None:
    assert launch().job.node_id == f"{socket.gethostname()}-{os.getpid()}"


# ------------------------------------------------------------------ every option

ALL_OPTIONS = {
    "--nnodes": "2:4",
    "--nproc-per-node": "8",
    "--rdzv-endpoint": "head:7",
    "--rdzv-backend": "rdzv",
    "--rdzv-id": "job-7",
    "--rdzv-conf": "join_timeout=1,last_call_timeout=0.5,scale_up=on-restart,restart_window=60,"
    "reuse=false,failure_stop_timeout=2,server_timeout=3",
    "--node-id": "n1",
    "--max-restarts": "5",
    "--role": "trainer",
    "--topology": "rack-1",
    "--local-addr": "10.0.0.5",
    "--log-dir": "logs",
    "--redirects": "3",
    "--tee": "0:1,11:2",
    "--local-ranks-filter": "0,2",
    "--duplicate-stdout-filters": "loss,a,,b",
    "--duplicate-stderr-filters": "error",
    "--log-line-prefix-template": "${rank} ",
    "--numa-binding": "node",
    "--signals-to-handle": "SIGTERM,SIGUSR1",
    "--monitor-interval": "5",
    "--start-method": "fork",
    "--event-log-handler": "null",
    "--shutdown-timeout": "1.5",
}


@pytest.mark.parametrize("spell", [str, lambda name: "--" + name[2:].replace("-", "_")])
@pytest.mark.parametrize("apart", [True, False])
def test_every_option_arrives_in_either_spelling(spell: type[str], apart: bool) -> None:
    argv: list[str] = []
    for name, value in ALL_OPTIONS.items():
        argv += [spell(name), value] if apart else [f"{spell(name)}={value}"]
    found, meeting = parse_launch([*argv, "train.py"])
    assert meeting.endpoints == (Endpoint("head", 7),)
    assert found.job.settings == Settings(2, 4, 5, 1_000, 500, ScaleUp.ON_RESTART, 60_000)
    assert (found.job.rdzv_id, found.job.node_id) == ("job-7", "n1")
    assert found.job.local_world_size == 8
    assert found.job.shutdown_timeout_ms == 1_500
    assert found.job.failure_stop_timeout_ms == 2_000
    assert found.job.server_timeout_ms == 3_000
    assert (found.role, found.topology, found.local_addr) == ("trainer", "rack-1", "10.0.0.5")
    assert found.output == Output(
        log_dir=Path.cwd() / "logs",
        redirects=dict.fromkeys(range(8), 3),
        tee={0: 1, 11: 2},
        shown_ranks=frozenset({0, 2}),
        stdout_filters=("loss", "a,b"),
        stderr_filters=("error",),
        prefix_template="${rank} ",
    )
    assert found.refuse_reuse
    assert found.numa_binding is NumaBinding.NODE
    assert found.signals == (Signals.SIGTERM, Signals.SIGUSR1)


@pytest.mark.slow
def test_flags_arrive() -> None:
    assert launch("-m").module
    assert launch("--module").module
    assert launch("--no-python").no_python
    assert launch("--no_python").no_python
    assert launch("-r", "1").output.redirects == {0: 1}
    assert launch("-t", "2").output.tee == {0: 2}
    assert launch("--run-path").run_path
    assert launch("--virtual-local-rank").virtual_local_rank
    assert endpoints("--standalone", *HEAD) == []


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert launch().python == "/opt/python"
    assert launch().job.shutdown_timeout_ms == 7_000
    assert launch("--shutdown-timeout=0").job.shutdown_timeout_ms == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("head", [("head", 29400)]),
        ("head:7", [("head", 7)]),
        ("a, b:7 ,[::1]:8,", [("a", 29400), ("b", 7), ("::1", 8)]),
        ("[::1]", [("::1", 29400)]),
    ],
)
def test_there_may_be_several_servers(text: str, expected: list[tuple[str, int]]) -> None:
    found = endpoints("--rdzv-backend=rdzv", f"--rdzv-endpoint={text}", "--rdzv-id=j")
    assert [(endpoint.host, endpoint.port) for endpoint in found] == expected


# ------------------------------------------------------------------ the script's own arguments


@pytest.mark.parametrize(
    ("argv", "script", "args"),
    [
        (
            ["train.py", "--nnodes=9", "--rdzv_id", "x"],
            "train.py",
            ("--nnodes=9", "--rdzv_id", "x"),
        ),
        (["train.py", "--a_b", "--a-b", "-r"], "train.py", ("--a_b", "--a-b", "-r")),
        (["train.py", "--help", "--version"], "train.py", ("--help", "--version")),
        # torchrun's own command line swallows the first of these two dashes as well.
        (["--role=a", "train.py", "--", "x"], "train.py", ("x",)),
        (["--role=a", "train.py", "x", "--", "y"], "train.py", ("x", "--", "y")),
        (["--role=a", "--", "train.py", "--role=b"], "train.py", ("--role=b",)),
        (["train.py", "x", "--standalone"], "train.py", ("x", "--standalone")),
        (["train.py", "", "a b", "${local_rank}"], "train.py", ("", "a b", "${local_rank}")),
        (["-m", "pkg.train", "-m", "x"], "pkg.train", ("-m", "x")),
        (["--no-python", "bash", "-c", "true"], "bash", ("-c", "true")),
    ],
)
def test_what_follows_the_script_belongs_to_the_script(
    argv: list[str], script: str, args: tuple[str, ...]
) -> None:
    found = parse_launch(argv)[0]
    assert (found.script, found.args) == (script, args)
    assert found.role == ("a" if "--role=a" in argv else "default")


@pytest.mark.parametrize(
    ("argv", "whole"),
    [
        (["--nproc-per=2"], ["--nproc-per-node=2"]),
        (["--nproc_p", "2"], ["--nproc-per-node=2"]),
        (["--nn", "2:3", "--max=1", *HEAD], ["--nnodes=2:3", "--max-restarts=1", *HEAD]),
        (["--rdzv-end=head", "--rdzv_i", "job-7"], list(HEAD)),
        (["--no-p", "--master-a=a"], ["--no-python", "--master-addr=a"]),
        # torchrun has no --node-id; it does not make the abbreviation ambiguous.
        (["--node=1", "--nnodes=2"], ["--node-rank=1", "--nnodes=2"]),
        (["-mt3", "--ro", "a b"], ["--module", "--tee=3", "--role=a b"]),
        (["-m", "-r", "0:1", "--stan"], ["--module", "--redirects=0:1", "--standalone"]),
    ],
)
def test_an_abbreviation_means_what_it_means_to_torchrun(argv: list[str], whole: list[str]) -> None:
    script = ["t", "--nn", "-m"]
    found = flags.parse([*argv, *script], {})
    assert vars(found) == vars(flags.parse([*whole, *script], {}))
    assert found.training_script_args == ["--nn", "-m"]


def test_a_value_that_looks_like_a_flag_is_left_alone() -> None:
    found, _ = parse_launch(["--rol", "x", "--rdzv-conf", "a=b", "t", "--rol", "--no"])
    assert (found.role, found.args) == ("x", ("--rol", "--no"))


# ------------------------------------------------------------------ torch.distributed.launch


@pytest.mark.slow
def test_a_script_of_old_is_told_its_local_rank_before_its_own_arguments() -> None:
    found, _ = parse_launch(["--nproc-per-node=2", "t.py", "a"], legacy=True)
    assert found.argv(1)[2:] == ("t.py", "--local-rank=1", "a")
    found, _ = parse_launch(["-m", "pkg.t", "a"], legacy=True)
    assert found.argv(0)[2:] == ("-m", "pkg.t", "--local-rank=0", "a")


def test_a_program_of_old_is_told_by_the_environment_alone() -> None:
    for option in ("--use-env", "--use_env", "--use"):
        found, _ = parse_launch([option, "--no-python", "t", "a"], legacy=True)
        assert found.argv(1) == ("t", "a")
    with pytest.raises(InvalidRequestError, match="add --use-env, and read LOCAL_RANK"):
        parse_launch(["--no-python", "t"], legacy=True)
    assert parse_launch(["--no-python", "t"])[0].argv(0) == ("t",)
    with pytest.raises(InvalidRequestError, match="--use-env is not a flag"):
        parse_launch(["--use-env", "t"])


# ------------------------------------------------------------------ what makes no sense

REFUSED = [
    ("--xyz", "--xyz is not a flag; see rdzvrun --help"),
    (
        "--nnodes=2",
        "--nnodes=2 needs a server; start rdzvd and give its address as --rdzv-endpoint=HOST:PORT",
    ),
    (
        "--nnodes=2 --standalone",
        "--standalone is for one node, but --nnodes=2 asks for more; leave one of them out",
    ),
    (
        "--nnodes=2 --rdzv-endpoint=head",
        "--rdzv-id is missing; without it this job could be mixed up with another; "
        "give all nodes of this job the same --rdzv-id=NAME",
    ),
    (
        "--rdzv-endpoint=head:x --rdzv-id=j",
        "endpoint 'head:x' cannot be used: 'x' is not a port; a port is a number from 1 to 65535",
    ),
    (
        "--rdzv-endpoint=, --rdzv-id=j",
        "endpoint ',' cannot be used: it names no host; write HOST:PORT, or several with commas",
    ),
    (
        "--rdzv-backend=etcd",
        "--rdzv-backend=etcd needs --rdzv-endpoint=HOST:PORT of an etcd v3",
    ),
    (
        "--rdzv-backend=etcd-v2 --rdzv-endpoint=e:2379",
        "--rdzv-id is missing; with --rdzv-backend=etcd-v2 all jobs share one etcd, and this one "
        "could be mixed up with another; give all nodes of this job the same --rdzv-id=NAME",
    ),
    (
        "--rdzv-backend=etcd --rdzv-endpoint=e --rdzv-id=j --rdzv-conf=protocol=ftp",
        "--rdzv-conf: protocol=ftp is unknown; use http or https",
    ),
    (
        "--rdzv-backend=mine",
        "--rdzv-backend=mine is not one of rdzv, c10d, etcd, static; give one of them",
    ),
    (
        "--rdzv-backend=c10d --nnodes=2",
        "--rdzv-backend=c10d with --nnodes=2 needs --rdzv-endpoint=HOST:PORT, where HOST is one of "
        "the nodes",
    ),
    (
        "--nnodes=2:3 --node-rank=1",
        "--nnodes=2:3: the static back-end needs a fixed number of nodes; give one number, or use "
        "an rdzvd",
    ),
    (
        "--nnodes=2 --node-rank=2",
        "--node-rank=2 is out of bounds; with --nnodes=2 give 0 to 1",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_makes_no_sense_is_refused_with_the_remedy(options: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        launch(*options.split())
    assert str(refusal.value) == message


@pytest.mark.parametrize("argv", [[], ["--role"]])
def test_a_launch_without_a_script_is_refused(argv: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="what is to run is missing; give a script after"):
        parse_launch(argv)


def test_what_has_no_effect_beside_c10d_is_mentioned() -> None:
    c10d = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29400")
    said = "; --node-rank and --master-* have no effect with c10d"
    assert parse_launch([*c10d, "--node-rank=1", "script.py"])[1].why.endswith(said)
    assert said not in parse_launch([*c10d, "script.py"])[1].why


def test_a_job_whose_node_serves_hears_nothing_of_rdzvd_and_tls() -> None:
    c10d = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=head:29400", "script.py")
    credentials = parse_launch(c10d)[1].credentials({})
    closed = "failed to connect to all addresses; last error: UNKNOWN: Socket closed"
    for details in ("connection refused", closed):
        at = Endpoint("head", 29400)
        unavailable = grpc.StatusCode.UNAVAILABLE
        text = str(error_from_status(unavailable, details, None, at, 10, credentials))
        assert text.startswith("cannot reach the serving node at head:29400: ")
        assert "rdzvd" not in text
        assert "tls" not in text.lower()


def test_an_address_that_needs_an_interface_is_refused() -> None:
    """The others would get it without its interface, and could not connect."""
    options = ("--rdzv-endpoint=[fe80::1%eth0]:29400", "--rdzv-id=j", "--rdzv-backend=rdzv")
    with pytest.raises(InvalidRequestError, match=r"endpoint \[fe80::1%eth0\]:29400 is link-local"):
        launch(*options)
    with pytest.raises(InvalidRequestError, match="--local-addr=fe80::2%eth0 is link-local"):
        launch(*options, "--local-addr=fe80::2%eth0")
    launch(*options, "--local-addr=10.0.0.2")


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan", ""])
def test_a_senseless_variable_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", value)
    with pytest.raises(InvalidRequestError) as refusal:
        launch()
    expected = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={value}: give a number of seconds from 0 to 86400"
    assert str(refusal.value) == expected


@pytest.mark.parametrize(
    "word", ["-h", "--help", "--help-all", "--version", "--print-completion=bash"]
)
def test_what_prints_and_exits_is_not_for_a_daemons_job(word: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{word} runs nothing; leave it out"):
        flags.refuse_answers(["--standalone", word, "t"])
    flags.refuse_answers(["--standalone", "t", word])


def test_unknown_settings_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    found = launch("--rdzv-conf=xyz=900, join_timeot=1, join_timeout = 5 ,,")
    assert found.job.settings.join_timeout_ms == 5_000
    unknown, misspelled = caplog.messages
    assert misspelled.endswith("ignoring unknown key join_timeot; did you mean `join_timeout`?")
    assert unknown == (
        "--rdzv-conf: ignoring unknown key xyz; known keys: join_timeout, last_call_timeout, "
        "scale_up, restart_window, restart_backoff, reuse, failure_stop_timeout, server_timeout, "
        "etcd_prefix, protocol, cacert, cert, key, etcd_user, etcd_password_file, is_host"
    )


def test_settings_of_torchruns_store_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        launch("--rdzv-conf=timeout=900,keep_alive_interval=5")
    assert not caplog.records


# ------------------------------------------------------------------ where the nodes meet


def test_the_c10d_back_end_is_served_by_the_node_that_owns_the_host() -> None:
    line = ("--rdzv-backend=c10d", "--nnodes=2")
    own = parse_launch([*line, "--rdzv-endpoint=127.0.0.1", "train.py"])[1]
    assert own.host_at == Endpoint("127.0.0.1", 29400)
    # An address reserved for documentation.
    other = parse_launch([*line, "--rdzv-endpoint=192.0.2.1:7", "train.py"])[1]
    assert (other.host_at, other.endpoints) == (None, (Endpoint("192.0.2.1", 7),))
    told = parse_launch(
        [*line, "--rdzv-endpoint=192.0.2.1:7", "--rdzv-conf=is_host=1", "train.py"]
    )[1]
    assert told.host_at == Endpoint("192.0.2.1", 7)


def test_the_etcd_back_ends_are_served_by_whom_the_nodes_elect() -> None:
    line = ("--rdzv-backend=etcd", "--nnodes=2:3", "--rdzv-endpoint=e1,e2:7")
    meeting = parse_launch([*line, "--rdzv-id=night:7", "train.py"])[1]
    assert meeting.elect_by is not None
    assert meeting.elect_by.endpoints == (Endpoint("e1", 2379), Endpoint("e2", 7))
    assert meeting.elect_by.prefix == "/torchelastic/p2p/night_3a_7"
    assert meeting.endpoints == meeting.elect_by.endpoints
    # No two jobs share a part of etcd.
    names = ("a:b", "a_3a_b", "a_b", "a.b", "a@b", "A:b")
    found = (parse_launch([*line, f"--rdzv-id={name}", "t"])[1].elect_by for name in names)
    assert len({etcd.prefix for etcd in found if etcd is not None}) == len(names)
    own = parse_launch(
        [*line, "--rdzv-id=j", "--rdzv-conf=etcd_prefix=/mine/,protocol=https", "train.py"]
    )[1]
    assert own.elect_by is not None
    assert (own.elect_by.prefix, own.elect_by.secure) == ("/mine/j", True)


def test_the_static_back_end_is_served_by_node_rank_0_and_ranks_are_node_ranks() -> None:
    line = ("--nnodes=12", "--master-addr=192.0.2.1", "--master-port=7")
    first, second, last = (
        parse_launch([*line, f"--node-rank={rank}", "train.py"]) for rank in (0, 1, 11)
    )
    assert first[1].host_at == Endpoint("192.0.2.1", 7)
    assert (second[1].host_at, last[1].host_at) == (None, None)
    assert {first[0].master, second[0].master, last[0].master} == {Endpoint("192.0.2.1", 7)}
    names = [launch.job.node_id for launch, _ in (first, second, last)]
    assert names == sorted(names) == ["node-rank-00000", "node-rank-00001", "node-rank-00011"]


@pytest.mark.slow
def test_one_node_with_an_endpoint_serves_itself_there_as_under_torchrun() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        at = f"127.0.0.1:{probe.getsockname()[1]}"
        line = ["--nnodes=1", f"--rdzv-endpoint={at}", "--rdzv-id=101"]
        taken = parse_launch([*line, "train.py"])[1]
    assert [str(endpoint) for endpoint in taken.endpoints] == [at]
    assert (
        taken.why == f"rdzvd at {at}; this node cannot serve there: the port is taken, or on "
        "another machine"
    )
    found, meeting = parse_launch([*line, "train.py"])
    assert (meeting.endpoints, str(meeting.host_at), meeting.rdzv_id) == ((), at, "101")
    assert (found.job.node_id, found.event_log.backend) == ("node-rank-00000", "static")
    for more in (
        "--rdzv-backend=rdzv",
        "--node-id=n1",
        "--topology=rack 1",
        "--tls-ca=ca.pem",
        "--rdzv-endpoint=192.0.2.1:7",
        f"--rdzv-endpoint={at},192.0.2.1",
    ):
        assert parse_launch([*line, more, "train.py"])[1].host_at is None, more


def test_one_node_without_a_port_meets_nobody() -> None:
    """As in torchrun: several such jobs may share a machine."""
    for line in (["--node-rank=0"], ["--master-addr=head"], ["--rdzv-backend=static"]):
        meeting = parse_launch([*line, "train.py"])[1]
        assert (meeting.endpoints, meeting.host_at) == ((), None)
        assert meeting.rdzv_id.startswith("standalone-")
    named = parse_launch(["--master-port=7", "train.py"])[1]
    assert (named.endpoints, named.host_at) == ((), Endpoint("127.0.0.1", 7))


def test_at_port_0_c10d_serves_this_node_alone() -> None:
    line = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    for more in ([], ["--nnodes=1:4"]):
        found, meeting = parse_launch([*line, *more, "train.py"])
        assert (meeting.endpoints, meeting.host_at, meeting.rdzv_id) == ((), None, "none")
        assert found.event_log.backend == "c10d"
    for more in (["--nnodes=2"], ["--rdzv-endpoint=192.0.2.1:0"], ["--rdzv-conf=is_host=0"]):
        with pytest.raises(InvalidRequestError, match="other nodes cannot know; give a port"):
            parse_launch([*line, *more, "train.py"])


def test_everything_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubeflow sets it: PET_* variables instead of the options."""
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("PET_MASTER_PORT", "7")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    found, meeting = parse_launch(["--max-restarts=5", "train"])
    assert meeting.endpoints == (Endpoint("192.0.2.1", 7),)
    assert found.job.settings.max_nodes == 2
    assert found.job.settings.max_restarts == 5
    assert found.job.local_world_size == 4
    assert found.no_python


@pytest.mark.slow
def test_help_is_short_and_says_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_launch(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert set(re.findall(r"^  (?:-\w[^-]*)?(--[\w-]+)", text, re.MULTILINE)) == {
        f"--{name.replace('_', '-')}" for name in flags.COMMON
    }
    assert "--help-all" in text
    assert len(text.splitlines()) < 80


@pytest.mark.slow
def test_help_all_mentions_every_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_launch(["--help-all"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in (*ALL_OPTIONS, "--standalone", "--module", "--no-python", "--version", "-r", "-m"):
        assert f"  {name}" in text or f", {name}" in text, name
    for key in CONF:
        assert f"{key}:" in " ".join(text.split())
    assert "--rdzv_id" not in text


@pytest.mark.parametrize("flag", ["--print-completion", "--print_completion=bash"])
def test_a_completion_script_is_of_all_flags_of_rdzvrun(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in torchrun, shtab makes it, and is needed only for that."""
    argv = [flag] if "=" in flag else [flag, "bash"]

    def complete(parser: argparse.ArgumentParser, shell: str) -> str:
        return f"{shell} {parser.prog} {'--fence-after' in parser.format_help()}"

    for shtab, code, out in (
        (types.SimpleNamespace(complete=complete), 0, "bash rdzvrun True\n"),
        (None, 1, ""),
    ):
        monkeypatch.setitem(sys.modules, "shtab", shtab)
        with pytest.raises(SystemExit) as ended:
            parse_launch(argv)
        assert (ended.value.code or 0, capsys.readouterr().out) == (code, out)


# ------------------------------------------------------------------ the program

PROGRAM = """
import sys
from rdzv.agent.run import main
sys.modules["torch"] = None  # importing it is an error from here on
status = []
for line in sys.argv[1].split(";"):
    try:
        main(line.split())
    except SystemExit as end:
        status.append(end.code)
print(status)
"""


@pytest.mark.slow
def test_the_program_refuses_with_exit_code_2_and_without_torch(tmp_path: Path) -> None:
    lines = (
        "--nnodes=x train.py",
        "nowhere.py",
        "--no-python nowhere",
        "--nope train.py",
        "--version",
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ";".join(lines)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[2, 2, 2, 2, 0]"
    assert "Traceback" not in done.stderr
    refusals = [line for line in done.stderr.splitlines() if line.startswith("rdzvrun: ")]
    assert refusals[0] == (
        "rdzvrun: --nnodes=x is not a number of nodes; give N or MIN:MAX, e.g. 2:4"
    )
    assert "nowhere.py" in refusals[1]
