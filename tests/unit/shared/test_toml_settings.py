"""Configurations: what is read, what is refused and in which words, what a reload changes."""

from __future__ import annotations

import doctest
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rdzv.settings.toml_settings
from examples import SETTLED
from rdzv.errors import InvalidRequestError
from rdzv.settings.toml_settings import (
    FILE_BYTES,
    LISTED_PROBLEMS,
    ConfigurationError,
    Kind,
    Knob,
    Knobs,
    Reload,
    Rule,
    Values,
    as_markdown,
    compare,
    load,
    render,
)


def host_port(text: str) -> None:
    if ":" not in text:
        raise InvalidRequestError(f"{text!r} is not HOST:PORT; give, for example, h:1")


def knob(key: str, kind: Kind, default: object = None, **more: object) -> Knob:
    return Knob(key=key, kind=kind, default=default, reason=f"What {key} is.", **more)  # type: ignore[arg-type]


def smaller_first(values: Values) -> str:
    if values.ms("wait.short") > values.ms("wait.long"):
        return "`wait.short` is above `wait.long`; give it less"
    return ""


KNOBS = Knobs(
    "testd",
    (
        knob("listen", Kind.STR, "h:1", unit="HOST:PORT", parse=host_port),
        knob("level", Kind.STR, "info", choices=("debug", "info"), reload=True),
        knob("quiet", Kind.BOOL, False, reload=True),
        knob("count", Kind.INT, 3, unit="jobs", least=1, most=1_000, reload=True),
        knob("share", Kind.FLOAT, 0.5, least=0, most=1),
        knob("buffer", Kind.SIZE, 64 * 2**20, least=2**10),
        knob("file", Kind.PATH),
        knob("peers", Kind.STRINGS, parse=host_port),
        knob("labels", Kind.TABLE),
        knob("wait.short", Kind.DURATION, 0.25, least=0.001, most=86_400, reload=True),
        knob("wait.long", Kind.DURATION, 2_592_000),
        knob("tls.cert", Kind.PATH),
        knob("tls.token", Kind.STR, secret=True),
        knob(
            "job",
            Kind.TABLES,
            each=Knobs(
                "testd",
                (
                    knob("name", Kind.STR, required=True),
                    knob("env", Kind.TABLE),
                    knob("stop.grace", Kind.DURATION, 30),
                ),
            ),
        ),
    ),
    (Rule(("wait.short", "wait.long"), smaller_first),),
)

FULL = """
listen = "n1:29400"
level = "debug"
quiet = true
count = 10
share = 1
buffer = "1 MiB"
file = "/etc/x"
peers = ["a:1", "b:2"]
labels = { rack = "r1", "odd name" = "é" }
wait.short = "100 ms"

[wait]
long = "2 h"
"""


NO_INT = "is no whole number; give one without quotes, for example 10"
NO_PATH = 'is no path; give one in quotes, for example "/etc/rdzv/ca.pem"'
TOO_FINE = "is finer than a millisecond; give whole milliseconds"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "testd.toml"


def read(file: Path, text: str, **given_: object) -> Values:
    file.write_text(text)
    return load(KNOBS, file, given_)


def refused(file: Path, text: str, **given_: object) -> list[str]:
    """Return what is wrong, each without the name of its file."""
    with pytest.raises(ConfigurationError) as caught:
        read(file, text, **given_)
    return [problem.text for problem in caught.value.problems]


def test_doctests() -> None:
    assert doctest.testmod(rdzv.settings.toml_settings).failed == 0


# ------------------------------------------------------------------------------------ reading


def test_each_kind_is_read(file: Path) -> None:
    values = read(file, FULL.replace("wait.short", "#"))
    assert values.get("listen", str) == "n1:29400"
    assert values.get("quiet", bool) is True
    assert values.get("count", int) == 10
    assert values.get("share", float) == 1.0
    assert values.get("buffer", int) == 2**20
    assert values.get("file", Path) == Path("/etc/x")
    assert values.strings("peers") == ("a:1", "b:2")
    assert values.table("labels") == {"rack": "r1", "odd name": "é"}
    assert values.ms("wait.long") == 7_200_000
    assert values.sources["count"] == str(file)


def test_what_is_not_set_has_its_default() -> None:
    values = load(KNOBS)
    assert values.get("count", int) == 3
    assert values.maybe("file", Path) is None
    assert values.strings("peers") == () and values.table("labels") == {}
    assert values.tables("job") == ()
    assert not values.sources


def test_the_command_line_wins_over_the_file(file: Path) -> None:
    values = read(file, "count = 10\nquiet = true", count=20, quiet=None)
    assert values.get("count", int) == 20
    assert values.get("quiet", bool) is True
    assert values.sources == {"count": "the command line", "quiet": str(file)}


def test_lists_of_tables_are_described_too(file: Path) -> None:
    text = '[[job]]\nname = "a"\nstop.grace = 5\n[[job]]\nname = "b"\n[job.env]\nX = "1"\n'
    one, two = read(file, text).tables("job")
    assert (one.get("name", str), one.ms("stop.grace"), one.table("env")) == ("a", 5_000, {})
    assert (two.get("name", str), two.ms("stop.grace"), two.table("env")) == (
        "b",
        30_000,
        {"X": "1"},
    )


@pytest.mark.parametrize(
    ("spelled", "ms"),
    [("1", 1_000), ("0.25", 250), ('"250 ms"', 250), ('"5min"', 300_000), ('"1.5 h"', 5_400_000),
     ('"1 d"', 86_400_000), ("0.001", 1)],
)  # fmt: skip
def test_durations_are_seconds_or_have_a_unit(file: Path, spelled: str, ms: int) -> None:
    assert read(file, f"[wait]\nshort = {spelled}").ms("wait.short") == ms


# ------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("cuont = 1", "`cuont` is unknown; the nearest known key is `count`"),
        ('cert = "/x"', "`cert` is unknown; the nearest known key is `tls.cert`"),
        ('"tls.cert" = "/x"', "`tls.cert` is unknown; the nearest known key is `tls.cert`"),
        ("[tsl]\na = 1", "`tsl` is unknown; the nearest known key is `tls`"),
        ("tls = 1", "`tls` = 1 is no table; begin with [tls]"),
        ("[count]", f"`count` = (a table) {NO_INT}"),
        ("[tls]\ncret = 1", "`tls.cret` is unknown; the nearest known key is `tls.cert`"),
        ("count = true", f"`count` = true {NO_INT}"),
        ("count = 1.0", f"`count` = 1.0 {NO_INT}"),
        ("count = 0", "`count` = 0 is too small; give 1 to 1000"),
        ("count = 1001", "`count` = 1001 is too large; give 1 to 1000"),
        ("quiet = 1", "`quiet` = 1 is neither true nor false; give one of them"),
        ("share = nan", "`share` = nan is no number that can be used; give a smaller one"),
        ("share = inf", "`share` = inf is no number that can be used; give a smaller one"),
        ("share = 1.5", "`share` = 1.5 is too large; give 0 to 1"),
        ('level = "loud"', '`level` = "loud" is none of its choices; give one of "debug", "info"'),
        ('level = ""', '`level` = "" is empty; give it a value, or leave it out'),
        ("level = 1", "`level` = 1 is no text; put it in quotes"),
        (
            'listen = "n1"',
            "`listen` = \"n1\" can not be used: 'n1' is not HOST:PORT; give, for example, h:1",
        ),
        (
            'peers = ["a:1", "b"]',
            "`peers` = ['a:1', 'b'] can not be used: 'b' is not HOST:PORT; give, for example, h:1",
        ),
        ("peers = [1]", "`peers` = [1] holds more than texts; put it in quotes"),
        ('peers = "a:1"', '`peers` = "a:1" is no list of texts; give, for example, ["a", "b"]'),
        ("labels = []", "`labels` = [] is no table of texts; begin with [labels]"),
        ("labels.a = 1", "`labels` = (a table) holds more than texts; put it in quotes"),
        (
            'buffer = "1 XiB"',
            '`buffer` = "1 XiB" is no size; give whole bytes, or a text such as "64 MiB" with one '
            "of TiB, GiB, MiB, KiB, B",
        ),
        ("buffer = 1", "`buffer` = 1 is too small; give at least 1 KiB"),
        (
            "wait.short = true",
            '`wait.short` = true is no duration; give seconds, or a text such as "5 s" with one of '
            "d, h, min, s, ms",
        ),
        (
            'wait.short = "5"',
            '`wait.short` = "5" is no duration; give seconds, or a text such as "5 s" with one of '
            "d, h, min, s, ms",
        ),
        ("wait.short = 0.0001", f"`wait.short` = 0.0001 {TOO_FINE}"),
        ("wait.short = 1e6", "`wait.short` = 1000000.0 is too large; give 1 ms to 1 d"),
        ("wait.short = -1", "`wait.short` = -1 is too small; give 1 ms to 1 d"),
        ('file = "x"', '`file` = "x" is relative; give the whole path, from / on'),
        ("file = 1", f"`file` = 1 {NO_PATH}"),
        ('file = "/\\u0000"', '`file` = "/\\u0000" holds a NUL, which no path has; correct it'),
        ("file = 2026-01-01", f"`file` = 2026-01-01 {NO_PATH}"),
        ("[job]", "`job` = (a table) is no list of tables; begin with [[job]]"),
        ("[[job]]", "`job[1].name` is missing; it says: What name is."),
        (
            '[[job]]\nname = "a"\n[[job]]\nname = "b"\nnmae = 1',
            "`job[2].nmae` is unknown; the nearest known key is `name`",
        ),
        (
            "[wait]\nshort = 50\nlong = 40",
            "`wait.short` is above `wait.long`; give it less",
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_used_is_refused(file: Path, line: str, problem: str) -> None:
    assert refused(file, line) == [problem]


def test_huge_numbers_are_refused_in_words(file: Path) -> None:
    huge = "9" * 400
    for line in (f"share = {huge}", f"wait.short = {huge}", f'wait.short = "{huge} d"'):
        assert refused(file, line)[0].endswith("is no number that can be used; give a smaller one")
    assert refused(file, f'buffer = "{huge} TiB"')[0].endswith("give a smaller one")


def test_everything_that_is_wrong_is_named_at_once(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(
            file,
            "cuont = 1\nquiet = 1\n[tls]\ncert = 2\n[wait]\nshort = 50\nlong = 40\n",
            level="x",
        )
    assert str(caught.value).splitlines() == [
        "the configuration has 5 problems:",
        f"  {file}: `cuont` is unknown; the nearest known key is `count`",
        f"  {file}: `quiet` = 1 is neither true nor false; give one of them",
        f'  {file}: `tls.cert` = 2 is no path; give one in quotes, for example "/etc/rdzv/ca.pem"',
        '  the command line: `level` = "x" is none of its choices; give one of "debug", "info"',
        f"  {file}: `wait.short` is above `wait.long`; give it less",
    ]


def test_one_problem_is_one_line(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(file, "count = 0")
    assert str(caught.value) == f"{file}: `count` = 0 is too small; give 1 to 1000"


def test_a_rule_is_not_asked_about_a_value_that_is_wrong_by_itself(file: Path) -> None:
    assert len(refused(file, '[wait]\nshort = "x"\nlong = 0')) == 1


def test_a_thousand_problems_are_not_all_listed(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(file, "\n".join(f"k{number} = 1" for number in range(1_000)))
    lines = str(caught.value).splitlines()
    assert len(lines) == LISTED_PROBLEMS + 2 and lines[-1] == "  and 950 more"


def test_long_values_are_cut_and_secrets_never_shown(file: Path) -> None:
    long, secret = refused(file, f'count = "{"x" * 5_000}"\n[tls]\ntoken = ["hunter2"]')
    assert len(long) < 200
    assert secret == "`tls.token` is no text; put it in quotes"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"count = ", "it is not TOML: Invalid value (at end of document); correct it"),
        (b"count = 1\ncount = 2", "it is not TOML: Cannot overwrite a value"),
        (b"\xff\xfe", "it is not TOML: 'utf-8' codec can't decode"),
        (b"a = " + b"[" * 100_000, "it can not be read:"),
        (b"count = " + b"9" * 5_000, "it can not be read:"),
        (b"#" * (FILE_BYTES + 1), "it is larger than 1048576 bytes; name a configuration file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused(
    file: Path, content: bytes, reason: str
) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load(KNOBS, file)
    assert str(caught.value).startswith(f"{file}: {reason}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigurationError, match=r"can not be read: .*; write it, or"):
            load(KNOBS, path)


# ------------------------------------------------------------------------------------ showing


def test_what_is_printed_is_the_same_configuration(file: Path, tmp_path: Path) -> None:
    text = FULL.replace("wait.short", "#") + '[[job]]\nname = "a"\nenv = { A = "1" }\n'
    values = read(file, text)
    again = tmp_path / "again.toml"
    again.write_text(render(values))
    assert load(KNOBS, again) == values
    (tmp_path / "defaults.toml").write_text(render(load(KNOBS)))
    assert load(KNOBS, tmp_path / "defaults.toml") == load(KNOBS)


def test_each_printed_line_is_explained(file: Path) -> None:
    lines = render(read(file, "count = 10")).splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines[: lines.index("count = 10")])
    assert comment.endswith(
        "What count is. Unit: jobs. Allowed: 1 to 1000. Default: 3. "
        f"Set by {file}. A reload applies it."
    )
    assert "#file = (not set)" in lines
    assert 'buffer = "64 MiB"' in lines and 'long = "30 d"' in lines
    for each in KNOBS.knobs:
        assert any(each.reason in line for line in lines)


def test_secrets_are_not_printed(file: Path) -> None:
    values = read(file, '[tls]\ntoken = "hunter2"')
    assert "hunter2" not in render(values) and "hunter2" not in repr(values)
    assert "#token = (it is set; a secret is not shown)" in render(values)
    change = compare(load(KNOBS), values)
    assert change.lines == ("tls.token is to change: that needs a restart",)


@pytest.mark.slow
@settings(SETTLED, max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_text_is_printed_so_that_it_can_be_read(text: str) -> None:
    values = load(KNOBS, given={"labels": {text: text}, "tls.token": "x"})
    assert tomllib.loads(render(values))["labels"] == {text: text}


@pytest.mark.slow
@settings(SETTLED, max_examples=200)
@given(ms=st.integers(1, 86_400_000), size=st.integers(2**10, 2**44))
def test_any_duration_and_size_is_printed_so_that_it_can_be_read(ms: int, size: int) -> None:
    values = load(KNOBS, given={"wait.short": ms / 1000, "buffer": size})
    raw = tomllib.loads(render(values))
    again = load(KNOBS, given={"wait.short": raw["wait"]["short"], "buffer": raw["buffer"]})
    assert again.ms("wait.short") == ms and again.get("buffer", int) == size


def test_every_knob_is_documented_with_unit_default_and_reason() -> None:
    lines = as_markdown(KNOBS).splitlines()
    assert "| `count` | jobs | `3` | 1 to 1000 | yes | What count is. |" in lines
    assert '| `long` | seconds | `"30 d"` |  | no | What wait.long is. |' in lines
    assert "| `file` | a path | not set |  | no | What file is. |" in lines
    assert "| `name` | a text | none: it must be set |  | no | What name is. |" in lines
    assert "## `[wait]`" in lines and "## `[[job]]`" in lines


# ------------------------------------------------------------------------------------ reloading


def reload(file: Path, before: str, after: str, **given_: object) -> Reload:
    return compare(read(file, before, **given_), read(file, after, **given_))


def test_a_reload_says_what_is_applied_and_what_needs_a_restart(file: Path) -> None:
    change = reload(file, "count = 1", 'count = 2\nlisten = "n2:1"\n[wait]\nshort = "5 min"')
    assert change.applied == ("count", "wait.short")
    assert change.waiting == ("listen",)
    assert change.lines == (
        'listen is to be "n2:1" (it is "h:1"): that needs a restart',
        "count is now 2 (it was 1)",
        'wait.short is now "5 min" (it was 0.25)',
    )
    assert change.values.get("count", int) == 2
    assert change.values.get("listen", str) == "h:1"


def test_what_waits_for_a_restart_is_said_at_every_reload(file: Path) -> None:
    change = reload(file, "", 'listen = "n2:1"')
    assert compare(change.values, read(file, 'listen = "n2:1"')).waiting == ("listen",)
    assert compare(change.values, read(file, "")).lines == ()


def test_a_reload_changes_nothing_that_the_command_line_has_set(file: Path) -> None:
    assert reload(file, "count = 1", "count = 2", count=3).lines == ()


def test_a_list_of_tables_that_changed_is_named(file: Path) -> None:
    change = reload(file, '[[job]]\nname = "a"', '[[job]]\nname = "b"')
    assert change.lines == ("job is to change: that needs a restart",)


def test_what_a_reload_applies_has_to_go_with_what_it_does_not(file: Path) -> None:
    before = read(file, "[wait]\nshort = 5\nlong = 10")
    after = read(file, "[wait]\nshort = 50\nlong = 100")
    with pytest.raises(ConfigurationError) as caught:
        compare(before, after)
    assert str(caught.value) == (
        f"{file}: `wait.short` is above `wait.long`; give it less; while wait.long still is as it "
        "was: restart instead of reloading"
    )


def test_values_can_not_be_changed(file: Path) -> None:
    values = read(file, 'count = 1\nlabels = { a = "b" }')
    with pytest.raises(TypeError):
        values.by_key["count"] = 2  # type: ignore[index]
    with pytest.raises(TypeError):
        values.table("labels")["a"] = "c"  # type: ignore[index]


def test_a_pipe_will_do_as_a_file() -> None:
    here, there = os.pipe()
    os.write(there, b"count = 5")
    os.close(there)
    try:
        assert load(KNOBS, Path(f"/dev/fd/{here}")).get("count", int) == 5
    finally:
        os.close(here)
