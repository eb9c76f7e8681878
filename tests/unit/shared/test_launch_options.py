"""A job's command line, as rdzvrun, rdzv-agent and rdzvctl submit parse it."""

import argparse

import pytest

from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import declared_flags, flags
from rdzv.launch_options.kinds import root_cause_exit


def args(*words: str) -> argparse.Namespace:
    return flags.parse([*words, "train.py"], {})


def settings(*words: str) -> Settings:
    return flags.read_settings(args(*words))


def test_settings_are_as_launched() -> None:
    conf = "join_timeout=9,last_call_timeout=0,scale_up=after:60,restart_window=3600"
    assert settings("--nnodes=2:4", "--max-restarts=3", f"--rdzv-conf={conf}") == Settings(
        min_nodes=2,
        max_nodes=4,
        max_restarts=3,
        join_timeout_ms=9_000,
        last_call_timeout_ms=0,
        scale_up=ScaleUp.AFTER,
        restart_window_ms=3_600_000,
        scale_up_after_ms=60_000,
    )
    assert settings() == Settings(1, 1)
    given = (
        *("--restart-backoff=0.5:10", "--restart-window=60", "--max-preemptions=0"),
        *("--max-store-failures=7", "--no-progress-restarts=2", "--max-restarts=1"),
        *("--restart-on=3,-9,5",),
        "--no-restart-on=SIGSEGV, IOError,torch.cuda.OutOfMemoryError,my_lib.Broken,Übel,",
    )
    assert settings(*given) == Settings(
        *(1, 1, 1),
        restart_window_ms=60_000,
        restart_backoff_ms=500,
        restart_backoff_max_ms=10_000,
        max_preemptions=0,
        max_store_failures=7,
        no_progress_restarts=2,
        restart_on=("137", "3", "5"),
        no_restart_on=("139", "OSError", "my_lib.Broken", "torch.OutOfMemoryError", "Übel"),
    )


def test_what_is_a_flag_and_a_key_may_be_given_as_either() -> None:
    conf = "--rdzv-conf=restart_backoff=2:8,restart_window=60"
    found = settings(conf)
    assert (found.restart_backoff_ms, found.restart_backoff_max_ms) == (2_000, 8_000)
    assert settings("--restart-backoff=2:8", "--restart-window=60") == found
    assert settings("--restart-backoff=2:8", conf) == found
    said = "--restart-backoff and restart_backoff in --rdzv-conf differ; leave one of them out"
    with pytest.raises(InvalidRequestError, match=said):
        settings("--restart-backoff=0", conf)


WORKERS = "give a whole number from 1 to 1000000, or auto, cpu, gpu, xpu"
LEASE = ", and at least 1 s below the server's lease"

REFUSED = [
    ("--nnodes=x", "--nnodes=x is not a number of nodes; give N or MIN:MAX, e.g. 2:4"),
    *((f"--nnodes={text}", "is not a number of nodes") for text in ("", "1:", "1:2:3", "-1", "²")),
    ("--nnodes=0:2", "--nnodes=0: give a whole number from 1 to 1000000"),
    ("--nnodes=1000001", "--nnodes=1000001: give a whole number from 1 to 1000000"),
    ("--nnodes=4:2", "--nnodes=4:2: the minimum 4 is above the maximum 2; swap them?"),
    ("--nproc-per-node=x", f"--nproc-per-node=x: {WORKERS}"),
    *((f"--nproc-per-node={text}", WORKERS) for text in ("", "0", "1000001", "²", "-1", "2.0")),
    (f"--nproc-per-node={'9' * 5_000}", WORKERS),
    ("--max-restarts=-1", "--max-restarts=-1: give a whole number from 0 to 1000000"),
    ("--max-restarts=1000001", "give a whole number from 0 to 1000000"),
    ("--max-restarts=x", "--max-restarts=x: give a whole number from 0 to 1000000"),
    ("--max-preemptions=-1", "--max-preemptions=-1: give a whole number from 0"),
    ("--max-store-failures=1000001", "--max-store-failures=1000001: give a whole number from 0"),
    ("--no-progress-restarts=-1", "--no-progress-restarts=-1: give a whole number from 0"),
    ("--node-rank=-1", "--node-rank=-1: give a whole number from 0"),
    ("--master-port=65536", "--master-port=65536: give a whole number from 0 to 65535"),
    ("--snapshot-dir-keep=0", "--snapshot-dir-keep=0: give a whole number from 1 to 1000000"),
    ("--shutdown-timeout=-1", "--shutdown-timeout=-1: give a number of seconds from 0 to 86400"),
    ("--shutdown-timeout=nan", "--shutdown-timeout=nan: give a number of seconds from 0 to 86400"),
    ("--shutdown-timeout=x", "--shutdown-timeout=x: give a number of seconds from 0 to 86400"),
    ("--keep-timeout=86401", "--keep-timeout=86401: give a number of seconds from 0 to 86400"),
    ("--park-timeout=-1", "--park-timeout=-1: give a number of seconds from 0 to 86400"),
    *(
        (f"--fence-after={text}", f"={text}: give a number of seconds from 1 to 3600{LEASE}")
        for text in ("0.5", "0.9", "3601", "inf", "nan", "0")
    ),
    ("--snapshot-memory=4G", "--snapshot-memory=4G: give a number of gigabytes from 0 to 1000000"),
    ("--snapshot-copy-rate=0.5", "from 1 to 100000, or 0 to have no copies on other nodes"),
    ("--snapshot-dir-every=0.5", "from 1 to 2592000, or 0 to write only at the end"),
    *(
        (f"--hang-timeout={text}", f"--hang-timeout={text}: give a number of seconds from 1 to")
        for text in ("0", "0.5", "-1", "86401", "nan", "Auto", "10m", "")
    ),
    ("--restart-backoff=", "--restart-backoff=: give a number of seconds from 0 to 2592000"),
    ("--restart-backoff=soon", "--restart-backoff=soon: give a number of seconds from 0"),
    ("--restart-backoff=1:", "--restart-backoff=: give a number of seconds from 0"),
    ("--restart-backoff=-1", "--restart-backoff=-1: give a number of seconds from 0"),
    ("--restart-backoff=9:1", "--restart-backoff=9:1: the longest wait is below the first"),
    ("--restart-backoff=2592001", "give a number of seconds from 0 to 2592000"),
    ("--restart-window=never", "--restart-window=never: give a number of seconds from 0"),
    ("--restart-on=0", "--restart-on: no failed worker ends with 0; give exit codes from 1"),
    ("--restart-on=256", "--restart-on: no failed worker ends with 256"),
    ("--restart-on=-65", "--restart-on: no failed worker ends with -65"),
    ("--restart-on=3", "--restart-on has no effect without --max-restarts; give a number"),
    ("--no-restart-on=3,valueerror", "'valueerror' is no exit code, signal or exception; did you"),
    ("--no-restart-on=ValueErorr", "did you mean `ValueError`"),
    ("--no-restart-on=SIGKIL", "did you mean `SIGKILL`"),
    ("--no-restart-on=kill", "did you mean `SIGKILL`"),
    ("--no-restart-on=SIGNAL", "give 3, SIGKILL, ValueError or torch.OutOfMemoryError, for"),
    ("--no-restart-on=oom", "'oom' is no exit code, signal or exception; give 3, SIGKILL"),
    ("--no-restart-on=a b", "'a b' is no exit code, signal or exception; give 3, SIGKILL"),
    (f"--no-restart-on={'X' * 129}", "X...' is no exit code, signal or exception"),
    (f"--no-restart-on={'9' * 9999}", "is no exit code, signal or exception"),
    (f"--no-restart-on={'3,' * 33}", "--no-restart-on 33 are too many; give at most 32"),
    ("--exit-code=root", "--exit-code=root: give 1, or root-cause"),
    ("--snapshot=last.pt", "--snapshot=last.pt has no effect without --no-progress-restarts"),
    ("--snapshot-dir=a\x1b", "--snapshot-dir='a\\x1b' has characters that cannot be printed"),
    ("--notice-signal=SIGSTOP", "--notice-signal=SIGSTOP is not a signal that a worker can"),
    ("--signals-to-handle=SIGKILL", "--signals-to-handle=SIGKILL: SIGKILL is not a signal that"),
    ("--warm=torch,1", "--warm=torch,1: '1' is not a module name; give names such as"),
    ("--rdzv-id=", "--rdzv-id '' is empty; give letters, digits"),
    ("--rdzv-id=a\x1b[2J", "--rdzv-id 'a\\x1b[2J' has characters that are not allowed"),
    (f"--node-id={'n' * 129}", "has 129 characters; give at most 128"),
    *(
        (f"{flag}=a\x1b[2J", f"{flag} 'a\\x1b[2J' has characters that cannot be printed")
        for flag in ("--role", "--topology", "--local-addr", "--master-addr")
    ),
    ("--redirects=4", "--redirects=4: '4' is not of the form LOCAL_RANK:N with N from 0 to 3"),
    ("--redirects=0:1,1", "--redirects=0:1,1: '1' is not of the form LOCAL_RANK:N"),
    ("--tee=x:1", "--tee=x:1: 'x:1' is not of the form LOCAL_RANK:N with N from 0 to 3"),
    *(
        (f"--rdzv-conf={text}", "is not of the form key=value")
        for text in ("a", "a=", "=1", "a=1,b", "reuse=")
    ),
    ("--rdzv-conf=reuse=yes", "--rdzv-conf: reuse=yes is not true or false"),
    ("--rdzv-conf=join_timeout=soon", "join_timeout=soon: give a number of seconds from 0.001 to"),
    ("--rdzv-conf=join_timeout=0", "join_timeout=0: give a number of seconds from 0.001 to"),
    ("--rdzv-conf=server_timeout=-1", "--rdzv-conf: server_timeout=-1: give a number of seconds"),
    ("--rdzv-conf=restart_window=inf", "restart_window=inf: give a number of seconds from 0 to"),
    ("--rdzv-conf=failure_stop_timeout=nan", "failure_stop_timeout=nan: give a number of seconds"),
    *(
        (f"--rdzv-conf=scale_up={text}", "is not one of eager, on-restart, after:SECONDS")
        for text in ("lazy", "after", "eager:5")
    ),
    *(
        (f"--rdzv-conf=scale_up=after:{text}", "give a number of seconds from 0.001 to 2592000")
        for text in ("", "SECONDS", "-1", "nan", "0", "2592001")
    ),
    ("-m --no-python", "-m and --no-python exclude each other; leave one of them out"),
    ("-m --run-path", "-m and --run-path exclude each other; leave one of them out"),
    ("--start-method=frok", "is not one of spawn, fork, forkserver; did you mean `fork`?"),
    ("--top=r1", "--top is not a flag; see rdzvrun --help"),
    ("--no", "--no may be --no-python or --node-rank; write one of them out"),
    ("--log=x", "--log may be --log-dir or --logs-specs; write one of them out"),
    ("--standlone", "--standlone is not a flag; did you mean `--standalone`?"),
    ("--role --standalone", "--role: expected one argument; see rdzvrun --help"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[row[0][:40] for row in REFUSED])
def test_what_makes_no_sense_is_refused_with_the_remedy(words: str, message: str) -> None:
    given = [words] if "=" in words else words.split()
    with pytest.raises(InvalidRequestError) as refusal:
        args(*given)
    assert message in str(refusal.value)


def test_a_flags_value_has_its_unit() -> None:
    found = args(
        *("--fence-after=3.5", "--hang-timeout=1.5", "--shutdown-timeout=0", "--keep-timeout=0"),
        *("--park-timeout=1", "--snapshot-memory=1.5", "--snapshot-copy-rate=0", "--warm"),
        *("--snapshot-dir-every=0", "--notice-signal=SIGUSR1", "--exit-code=root-cause"),
        *("--tee=0:1,11:2", "--redirects=3", "--nproc-per-node=gpu", "--max=3", "--red=1"),
    )
    assert found.hang_timeout == HangTimeout(1_500)
    assert (found.fence_after_ms, found.shutdown_timeout) == (3_500, 0)
    assert (found.keep_timeout_ms, found.park_timeout_ms) == (0, 1_000)
    assert (found.snapshot_memory, found.snapshot_copy_rate) == (1_500_000_000, 0)
    assert (found.snapshot_dir_every, found.notice_signum, found.root_cause_exit) == (0, 10, True)
    assert (found.tee, found.redirects, found.nproc_per_node) == ({0: 1, 11: 2}, 1, "gpu")
    # No flag of ours changes what an abbreviation means under torchrun.
    assert (found.max_restarts, found.warm) == (3, ("torch",))


def test_a_variable_is_read_like_its_flag() -> None:
    environ = {"PET_HANG_TIMEOUT": "auto", "PET_KEEP_TIMEOUT": "2", "PET_TLS_CA": "x"}
    found = flags.parse(["t.py"], environ)
    assert (found.hang_timeout, found.keep_timeout_ms) == (HangTimeout(None), 2_000)
    assert found.tls_ca is None
    assert flags.parse(["--no-warm", "t.py"], {"PET_WARM": "torch"}).warm == ()
    with pytest.raises(InvalidRequestError, match="--keep-timeout=x: give a number of seconds"):
        flags.parse(["t.py"], {"PET_KEEP_TIMEOUT": "x"})


@pytest.mark.parametrize(
    ("exit_code", "signum", "code", "said"),
    [
        (3, None, 3, ""),
        (1, None, 1, ""),
        (137, None, 137, ""),
        (None, 9, 137, ""),
        (75, None, 1, "the root cause's own exit code 75 would mean something else"),
        (0, None, 1, "the root cause's own exit code 0 would mean something else"),
        (None, None, 1, "no exit of a worker is known to have ended the job"),
    ],
)
def test_a_root_causes_exit_code_is_passed_on_unless_it_is_ours(
    exit_code: int | None, signum: int | None, code: int, said: str
) -> None:
    found, why = root_cause_exit(exit_code, signum, (75, 77, 93))
    assert (found, why.partition(", because ")[2]) == (code, said)


def test_keys_of_other_back_ends_are_known() -> None:
    conf = args("--rdzv-conf=timeout=900,cacert=x,ssl_cert=y,join_timeout=1,jion_timeout=2")
    assert str(conf.rdzv_conf["cert"]) == "y"
    assert declared_flags.unknown_keys(conf.rdzv_conf) == [
        "--rdzv-conf: ignoring unknown key jion_timeout; did you mean `join_timeout`?"
    ]


def split(*words: str) -> tuple[list[tuple[str, ...]], list[str]]:
    given, rest = flags.make_parser({}, legacy=False).split(words)
    return [one.words for one in given], rest


@pytest.mark.slow
def test_flags_end_where_the_script_begins() -> None:
    assert split("--nn", "2", "-mt3", "--rdzv_conf=a=b", "t", "--nnodes", "9") == (
        [("--nnodes", "2"), ("-mt3",), ("--rdzv_conf=a=b",)],
        ["t", "--nnodes", "9"],
    )
    assert split("-t", "3", "--", "--t.py") == ([("-t", "3")], ["--", "--t.py"])
    assert split("--nope", "t") == ([], ["--nope", "t"])
    assert split("-mz", "t") == ([], ["-mz", "t"])
    assert split("--role") == ([("--role",)], [])
    assert split() == ([], [])
