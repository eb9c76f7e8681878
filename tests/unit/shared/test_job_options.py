"""A command line's options of the job itself; every reader uses the same names."""

import argparse

import pytest

from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import declared_flags, flags
from rdzv.launch_options.job_options import (
    MAX_COUNT,
    check_words,
    conf_bool,
    conf_ms,
    fence_after_ms,
    hang_timeout,
    parse_conf,
    parse_nproc,
    parse_scale_up,
    read_settings,
    root_cause_exit,
    shutdown_timeout_ms,
    unknown_key_warnings,
)


def args(*words: str) -> argparse.Namespace:
    return flags.parse([*words, "train.py"], {})


def test_settings_are_read_without_asking_the_machine() -> None:
    conf = parse_conf("join_timeout=9,last_call_timeout=0,scale_up=after:60,restart_window=3600")
    assert read_settings(args("--nnodes=2:4", "--max-restarts=3"), conf) == Settings(
        min_nodes=2,
        max_nodes=4,
        max_restarts=3,
        join_timeout_ms=9_000,
        last_call_timeout_ms=0,
        scale_up=ScaleUp.AFTER,
        restart_window_ms=3_600_000,
        scale_up_after_ms=60_000,
    )


def test_budgets_are_as_launched() -> None:
    assert read_settings(args(), {}) == Settings(1, 1)
    given = (
        *("--restart-backoff=0.5:10", "--restart-window=60", "--max-preemptions=0"),
        *("--max-store-failures=7", "--no-progress-restarts=2", "--restart-on=3,-9,5"),
        "--no-restart-on=SIGSEGV, IOError,torch.cuda.OutOfMemoryError,my_lib.Broken,Übel,",
    )
    assert read_settings(args(*given), {}) == Settings(
        *(1, 1),
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
    conf = parse_conf("restart_backoff=2:8,restart_window=60")
    found = read_settings(args(), conf)
    assert (found.restart_backoff_ms, found.restart_backoff_max_ms) == (2_000, 8_000)
    assert read_settings(args("--restart-backoff=2:8", "--restart-window=60"), conf) == found
    said = "--restart-backoff=0 and --rdzv-conf=restart_backoff=2:8 differ; leave one of them out"
    with pytest.raises(InvalidRequestError, match=said):
        read_settings(args("--restart-backoff=0"), conf)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--restart-backoff=", "--restart-backoff= is not a number of seconds; give one from 0 on"),
        ("--restart-backoff=soon", "--restart-backoff=soon is not a number of seconds"),
        ("--restart-backoff=1:", "--restart-backoff=1: is not a number of seconds"),
        ("--restart-backoff=-1", "--restart-backoff=-1 is not a number of seconds"),
        ("--restart-backoff=9:1", "--restart-backoff=9:1: the longest wait is below the first"),
        ("--restart-backoff=2592001", "is too long; give at most 2592000 seconds"),
        ("--restart-window=never", "--restart-window=never is not a number of seconds"),
        ("--max-preemptions=-1", "--max-preemptions=-1 is too small; give at least 0"),
        ("--no-progress-restarts=-1", "--no-progress-restarts=-1 is too small; give at least 0"),
        ("--max-store-failures=1000001", "--max-store-failures=1000001 is too large"),
        ("--restart-on=0", "--restart-on: no failed worker ends with 0; give exit codes from 1"),
        ("--restart-on=256", "--restart-on: no failed worker ends with 256"),
        ("--restart-on=-65", "--restart-on: no failed worker ends with -65"),
        ("--no-restart-on=3,valueerror", "'valueerror' is no exit code, .*mean `ValueError`"),
        ("--no-restart-on=ValueErorr", "did you mean `ValueError`"),
        ("--no-restart-on=SIGKIL", "did you mean `SIGKILL`"),
        ("--no-restart-on=kill", "did you mean `SIGKILL`"),
        ("--no-restart-on=SIGNAL", "give 3, SIGKILL, ValueError or torch.OutOfMemoryError, for"),
        ("--no-restart-on=oom", "'oom' is no exit code, signal or exception; give 3, SIGKILL"),
        ("--no-restart-on=a b", "'a b' is no exit code, signal or exception; give 3, SIGKILL"),
        (f"--no-restart-on={'X' * 129}", "X...' is no exit code, signal or exception"),
        (f"--no-restart-on={'9' * 9999}", "is no exit code, signal or exception"),
        (f"--no-restart-on={'3,' * 33}", "--no-restart-on lists 33 ends of workers; give at most"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(flag: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_settings(args(flag), {})


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


def test_what_is_restarted_needs_restarts() -> None:
    check_words(args("--no-restart-on=3"))
    check_words(args("--restart-on=3", "--max-restarts=1"))
    with pytest.raises(InvalidRequestError, match="--restart-on=3 has no effect without --max-r"):
        check_words(args("--restart-on=3"))


def test_an_exit_code_is_1_or_the_root_causes() -> None:
    with pytest.raises(InvalidRequestError, match="--exit-code=root: give 1, or root-cause"):
        check_words(args("--exit-code=root"))


def test_no_flag_of_ours_changes_what_an_abbreviation_means_under_torchrun() -> None:
    assert args("--max=3", "--red=1").max_restarts == 3


@pytest.mark.parametrize("text", ["auto", "cpu", "gpu", "xpu"])
def test_what_a_node_has_is_for_the_node_to_count(text: str) -> None:
    assert parse_nproc(text) == 0


@pytest.mark.parametrize("text", ["0", "1000001", "9" * 5_000, "²", "-1", "2.0", ""])
def test_a_number_of_workers_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--nproc-per-node="):
        parse_nproc(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("after", "is not one of eager, on-restart, after:SECONDS"),
        ("after:SECONDS", "is not a number of seconds"),
        ("after:", "is not a number of seconds"),
        ("after:-1", "is not a number of seconds"),
        ("after:nan", "is not a number of seconds"),
        ("after:0", "is too short; give at least 0.001 seconds"),
        ("after:2592001", "is too long; give at most 2592000 seconds"),
        ("eager:5", "is not one of eager, on-restart, after:SECONDS"),
    ],
)
def test_a_policy_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        parse_scale_up(text)


def test_keys_of_other_back_ends_are_known() -> None:
    conf = parse_conf("timeout=900,cacert=x,ssl_cert=y,join_timeout=1,jion_timeout=2")
    assert unknown_key_warnings(conf) == [
        "--rdzv-conf: ignoring unknown key jion_timeout; did you mean `join_timeout`?"
    ]


@pytest.mark.parametrize("text", ["=1", "a", "a=", "a=1,b"])
def test_a_setting_that_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not of the form key=value"):
        parse_conf(text)


def test_numbers_of_seconds_keep_their_bounds() -> None:
    assert conf_ms({"a": "0.0004"}, "a", 1) == 0
    assert conf_ms({}, "a", 1.5) == 1_500
    with pytest.raises(InvalidRequestError, match="too short"):
        conf_ms({"a": "0.0004"}, "a", 1, least_ms=1)
    assert shutdown_timeout_ms("--shutdown-timeout=1.5", "1.5") == 1_500
    assert (fence_after_ms(None), fence_after_ms(1.0), fence_after_ms(3_600.0)) == (
        0,
        1_000,
        3_600_000,
    )
    for seconds in (0.9, 3_601.0, float("inf")):
        with pytest.raises(InvalidRequestError, match="--fence-after="):
            fence_after_ms(seconds)


def test_a_truth_is_one_of_four_words() -> None:
    found = [conf_bool({"a": text}, "a", default=True) for text in ("true", "False", "1", "0")]
    assert found == [True, False, True, False]
    with pytest.raises(InvalidRequestError, match="not true or false"):
        conf_bool({"a": "yes"}, "a", default=True)


@pytest.mark.parametrize("flag", ["--rdzv-id", "--role", "--topology", "--node-id"])
def test_names_that_would_do_things_to_a_terminal_are_refused(flag: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{flag}='a.x1b.* cannot be printed"):
        check_words(args(f"{flag}=a\x1b[2J"))


def test_no_count_is_above_what_a_message_can_carry() -> None:
    with pytest.raises(InvalidRequestError, match=f"give at most {MAX_COUNT}"):
        read_settings(args("--max-restarts=1000001"), {})
    with pytest.raises(InvalidRequestError, match=f"give at most {MAX_COUNT}"):
        read_settings(args("--nnodes=1000001"), {})


# ------------------------------------------------------------------ words, taken apart


def split(*words: str) -> tuple[list[tuple[str, ...]], list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in declared_flags.FLAGS:
        flags.add(parser, option)
    given, rest = flags.split(words, flags.options(parser))
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


@pytest.mark.slow
def test_a_hang_timeout_is_a_number_of_seconds_or_learned() -> None:
    assert args().hang_timeout is None
    assert hang_timeout(None) is None
    assert hang_timeout(args("--hang-timeout=1.5").hang_timeout) == HangTimeout(1_500)
    assert hang_timeout(args("--hang_timeout", "auto").hang_timeout) == HangTimeout(None)
    assert flags.parse(["t.py"], {"PET_HANG_TIMEOUT": "600"}).hang_timeout == "600"
    for text in ("0", "0.5", "-1", "86401", "nan", "Auto", "10m", ""):
        with pytest.raises(InvalidRequestError, match=f"--hang-timeout={text}: give a number of"):
            hang_timeout(text)
