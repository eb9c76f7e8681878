"""Configuration files: what is read, what is refused and how, and what a reload changes."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.errors import InvalidRequestError
from rdzv.settings.rendering import render
from rdzv.settings.setting_types import Rule, Table, settings_of
from rdzv.settings.toml_files import (
    FILE_BYTES,
    LISTED_PROBLEMS,
    ConfigurationError,
    Loaded,
    Reload,
    compare,
    load,
)
from rdzv.structs import Duration, Size, setting


def host_port(text: str) -> None:
    if ":" not in text:
        raise InvalidRequestError(f"{text!r} is not HOST:PORT; give, for example, h:1")


class Place:
    """A class that parses its texts itself."""

    def __init__(self, host: str, port: int) -> None:
        self.at = (host, port)

    @classmethod
    def parse(cls, text: str) -> "Place":
        host_port(text)
        host, _, port = text.partition(":")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.at[0]}:{self.at[1]}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.at == other.at

    __hash__ = None  # type: ignore[assignment]


def short_first(settings: "Settings") -> str:
    if settings.wait.short_ms > settings.wait.long_ms:
        return "`wait.short` is above `wait.long`; give it less"
    return ""


NOTHING: Mapping[str, str] = MappingProxyType({})


class Stop(Table, frozen=True):
    grace_ms: Annotated[Duration, setting(reason="What stop.grace is.")] = 30_000


class Job(Table, frozen=True, kw_only=True):
    name: Annotated[str, setting(reason="What name is.")]
    env: Annotated[Mapping[str, str], setting(reason="What env is.")] = NOTHING
    stop: Stop


class Wait(Table, frozen=True):
    short_ms: Annotated[
        Duration, setting(ge=1, le=86_400_000, reload=True, reason="What wait.short is.")
    ] = 250
    long_ms: Annotated[Duration, setting(reason="What wait.long is.")] = 2_592_000_000


class Tls(Table, frozen=True):
    cert: Annotated[Path | None, setting(reason="What tls.cert is.")] = None


class Settings(Table, frozen=True, kw_only=True):
    program = "testd"
    rules = (Rule(("wait.short", "wait.long"), short_first),)

    listen: Annotated[Place, setting(unit="HOST:PORT", reason="What listen is.")] = Place("h", 1)
    level: Annotated[Literal["debug", "info"], setting(reload=True, reason="What level is.")] = (
        "info"
    )
    quiet: Annotated[bool, setting(reload=True, reason="What quiet is.")] = False
    count: Annotated[
        int, setting(unit="jobs", ge=1, le=1_000, reload=True, reason="What count is.")
    ] = 3
    share: Annotated[float, setting(ge=0, le=1, reason="What share is.")] = 0.5
    buffer: Annotated[Size, setting(ge=2**10, reason="What buffer is.")] = 64 * 2**20
    file: Annotated[Path | None, setting(reason="What file is.")] = None
    peers: Annotated[tuple[str, ...], setting(check=host_port, reason="What peers is.")] = ()
    labels: Annotated[Mapping[str, str], setting(reason="What labels is.")] = NOTHING
    wait: Wait
    tls: Tls
    job: Annotated[tuple[Job, ...], setting(reason="What job is.")] = ()


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


NO_INT = "must be a whole number without quotes, 1 to 1000"
NO_PATH = 'must be a path from / on, such as "/etc/rdzv/ca.pem"'
NO_SIZE = (
    'must be a number of bytes, or a text such as "64 MiB" with one of TiB, GiB, MiB, KiB, B, '
    "at least 1 KiB"
)
NO_DURATION = (
    'must be a number of seconds, or a text such as "5 s" with one of d, h, min, s, ms, 1 ms to 1 d'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "testd.toml"


def read(file: Path, text: str, **given_: object) -> Loaded[Settings]:
    file.write_text(text)
    return load(Settings, file, given_)


def refused(file: Path, text: str, **given_: object) -> list[str]:
    """Return the errors, without the file's name."""
    with pytest.raises(ConfigurationError) as caught:
        read(file, text, **given_)
    return [problem.text for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("key", "value", "spelled"),
    [
        ("buffer", 64 * 2**20, '"64 MiB"'),
        ("buffer", 100, "100"),
        ("wait.long", 300_000, '"5 min"'),
        ("wait.long", 5_000, "5"),
        ("wait.short", 250, "0.25"),
        ("labels", {"odd name": "é\x07"}, r'{ "odd name" = "é\u0007" }'),
    ],
)
def test_values_are_spelled_as_toml(key: str, value: object, spelled: str) -> None:
    assert settings_of(Settings)[key].spelled(value) == spelled


# ------------------------------------------------------------------------------------ reading


def test_each_kind_is_read(file: Path) -> None:
    loaded = read(file, FULL.replace("wait.short", "#"))
    settings = loaded.settings
    assert settings.listen.at == ("n1", 29400)
    assert settings.quiet is True
    assert settings.count == 10
    assert (settings.share, type(settings.share)) == (1.0, float)
    assert settings.buffer == 2**20
    assert settings.file == Path("/etc/x")
    assert settings.peers == ("a:1", "b:2")
    assert settings.labels == {"rack": "r1", "odd name": "é"}
    assert settings.wait.long_ms == 7_200_000
    assert loaded.sources["count"] == str(file)


def test_what_is_not_set_has_its_default() -> None:
    loaded = load(Settings)
    settings = loaded.settings
    assert settings.count == 3
    assert settings.file is None
    assert settings.peers == () and settings.labels == {}
    assert settings.job == ()
    assert not loaded.sources


def test_the_command_line_wins_over_the_file(file: Path) -> None:
    loaded = read(file, "count = 10\nquiet = true", count=20, quiet=None)
    assert loaded.settings.count == 20
    assert loaded.settings.quiet is True
    assert loaded.sources == {"count": "the command line", "quiet": str(file)}


def test_lists_of_tables_are_described_too(file: Path) -> None:
    text = '[[job]]\nname = "a"\nstop.grace = 5\n[[job]]\nname = "b"\n[job.env]\nX = "1"\n'
    loaded = read(file, text)
    assert loaded.settings.job == (
        Job(name="a", env={}, stop=Stop(5_000)),
        Job(name="b", env={"X": "1"}, stop=Stop(30_000)),
    )
    assert loaded.sources["job[1].stop.grace"] == str(file)


@pytest.mark.parametrize(
    ("spelled", "ms"),
    [("1", 1_000), ("0.25", 250), ('"250 ms"', 250), ('"5min"', 300_000), ('"1.5 h"', 5_400_000),
     ('"1 d"', 86_400_000), ("0.001", 1)],
)  # fmt: skip
def test_durations_are_seconds_or_have_a_unit(file: Path, spelled: str, ms: int) -> None:
    assert read(file, f"[wait]\nshort = {spelled}").settings.wait.short_ms == ms


# ------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("cuont = 1", "`cuont` is unknown; did you mean `count`?"),
        ('cert = "/x"', "`cert` is unknown; did you mean `tls.cert`?"),
        ('"tls.cert" = "/x"', "`tls.cert` is unknown; did you mean `tls.cert`?"),
        ("[tsl]\na = 1", "`tsl` is unknown; did you mean `tls`?"),
        ("tls = 1", "`tls` = 1 must be a table; begin with [tls]"),
        ("[count]", f"`count` = (a table) {NO_INT}"),
        ("[tls]\ncret = 1", "`tls.cret` is unknown; did you mean `tls.cert`?"),
        ("count = true", f"`count` = true {NO_INT}"),
        ("count = 1.0", f"`count` = 1.0 {NO_INT}"),
        ("count = 0", f"`count` = 0 {NO_INT}"),
        ("count = 1001", f"`count` = 1001 {NO_INT}"),
        ("quiet = 1", "`quiet` = 1 must be true or false without quotes"),
        ("share = nan", "`share` = nan must be a smaller number"),
        ("share = inf", "`share` = inf must be a smaller number"),
        ("share = 1.5", "`share` = 1.5 must be a number without quotes, 0 to 1"),
        ('level = "loud"', '`level` = "loud" must be one of "debug", "info"'),
        ('level = "inof"', '`level` = "inof" must be one of "debug", "info"; did you mean `info`?'),
        ('level = ""', '`level` = "" must be one of "debug", "info"'),
        ("level = 1", '`level` = 1 must be one of "debug", "info"'),
        (
            'listen = "n1"',
            "`listen` = \"n1\" cannot be used: 'n1' is not HOST:PORT; give, for example, h:1",
        ),
        (
            'peers = ["a:1", "b"]',
            "`peers` = ['a:1', 'b'] cannot be used: 'b' is not HOST:PORT; give, for example, h:1",
        ),
        ("peers = [1]", '`peers` = [1] must be a list of texts, such as ["a", "b"]'),
        ('peers = "a:1"', '`peers` = "a:1" must be a list of texts, such as ["a", "b"]'),
        ("labels = []", "`labels` = [] must be a table of texts; begin with [labels]"),
        ("labels.a = 1", "`labels` = (a table) must be a table of texts; begin with [labels]"),
        ('buffer = "1 XiB"', f'`buffer` = "1 XiB" {NO_SIZE}'),
        ("buffer = 1.5", f"`buffer` = 1.5 {NO_SIZE}"),
        ("buffer = 1", f"`buffer` = 1 {NO_SIZE}"),
        ("wait.short = true", f"`wait.short` = true {NO_DURATION}"),
        ('wait.short = "5"', f'`wait.short` = "5" {NO_DURATION}'),
        ('peers = [""]', "`peers` = [''] must not be empty; give it a value, or leave it out"),
        ("listen = 1", "`listen` = 1 must be HOST:PORT in quotes"),
        ("listen.port = 1", "`listen` = (a table) must be HOST:PORT in quotes"),
        ("wait.short = 0.0001", "`wait.short` = 0.0001 must be a whole number of milliseconds"),
        ("wait.short = 1e6", f"`wait.short` = 1000000.0 {NO_DURATION}"),
        ("wait.short = -1", f"`wait.short` = -1 {NO_DURATION}"),
        ('file = "x"', f'`file` = "x" {NO_PATH}'),
        ("file = 1", f"`file` = 1 {NO_PATH}"),
        (
            'file = "/\\u0000"',
            '`file` = "/\\u0000" must not be empty or have a NUL character; correct it',
        ),
        ("file = 2026-01-01", f"`file` = 2026-01-01 {NO_PATH}"),
        ("[job]", "`job` = (a table) must be a list of tables; begin with [[job]]"),
        ("[[job]]", "`job[1].name` is missing: What name is."),
        (
            '[[job]]\nname = "a"\n[[job]]\nname = "b"\nnmae = 1',
            "`job[2].nmae` is unknown; did you mean `name`?",
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
        assert refused(file, line)[0].endswith("must be a smaller number")
    assert refused(file, f'buffer = "{huge} TiB"')[0].endswith("must be a smaller number")


def test_everything_that_is_wrong_is_named_at_once(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(
            file,
            "cuont = 1\nquiet = 1\n[tls]\ncert = 2\n[wait]\nshort = 50\nlong = 40\n",
            level="x",
        )
    assert str(caught.value).splitlines() == [
        "the configuration has 5 problems:",
        f"  {file}: `cuont` is unknown; did you mean `count`?",
        f"  {file}: `quiet` = 1 must be true or false without quotes",
        f"  {file}: `tls.cert` = 2 {NO_PATH}",
        '  the command line: `level` = "x" must be one of "debug", "info"',
        f"  {file}: `wait.short` is above `wait.long`; give it less",
    ]


def test_bytes_of_the_command_line_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(Settings, given={"level": "\udcff", "count": "\udcff"})
    assert [problem.text for problem in caught.value.problems] == [
        '`level` = "\\udcff" must be one of "debug", "info"',
        f'`count` = "\\udcff" {NO_INT}',
    ]


def test_one_problem_is_one_line(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(file, "count = 0")
    assert str(caught.value) == f"{file}: `count` = 0 {NO_INT}"


def test_a_rule_is_not_asked_about_a_value_that_is_wrong_by_itself(file: Path) -> None:
    assert len(refused(file, '[wait]\nshort = "x"\nlong = 0')) == 1


@pytest.mark.slow
def test_a_thousand_problems_are_not_all_listed(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(file, "\n".join(f"k{number} = 1" for number in range(1_000)))
    lines = str(caught.value).splitlines()
    assert len(lines) == LISTED_PROBLEMS + 2 and lines[-1] == "  and 950 more"


def test_long_values_are_cut(file: Path) -> None:
    (long,) = refused(file, f'count = "{"x" * 5_000}"')
    assert len(long) < 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"count = ", "it is not TOML: Invalid value (at end of document); correct it"),
        (b"count = 1\ncount = 2", "it is not TOML: Cannot overwrite a value"),
        (b"\xff\xfe", "it is not TOML: 'utf-8' codec can't decode"),
        (b"a = " + b"[" * 100_000, "it cannot be read:"),
        (b"count = " + b"9" * 5_000, "it cannot be read:"),
        (b"#" * (FILE_BYTES + 1), "it is larger than 1048576 bytes; name another file"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused(
    file: Path, content: bytes, reason: str
) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        load(Settings, file)
    assert str(caught.value).startswith(f"{file}: {reason}")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigurationError, match=r"cannot be read: .*; write it, or"):
            load(Settings, path)


# ------------------------------------------------------------------------------------ showing


def test_what_is_printed_is_the_same_configuration(file: Path, tmp_path: Path) -> None:
    text = FULL.replace("wait.short", "#") + '[[job]]\nname = "a"\nenv = { A = "1" }\n'
    loaded = read(file, text)
    again = tmp_path / "again.toml"
    again.write_text(render(loaded))
    assert load(Settings, again).settings == loaded.settings
    (tmp_path / "defaults.toml").write_text(render(load(Settings)))
    assert load(Settings, tmp_path / "defaults.toml").settings == load(Settings).settings


def test_each_printed_line_is_explained(file: Path) -> None:
    lines = render(read(file, "count = 10")).splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines[: lines.index("count = 10")])
    assert comment.endswith(
        "What count is. Unit: jobs. Allowed: 1 to 1000. Default: 3. "
        f"Set by {file}. A reload applies it."
    )
    assert "#file = (not set)" in lines
    assert 'buffer = "64 MiB"' in lines and 'long = "30 d"' in lines
    for each in settings_of(Settings).values():
        assert any(each.reason in line for line in lines)


@pytest.mark.slow
@settings(SETTLED, max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_text_is_printed_so_that_it_can_be_read(text: str) -> None:
    loaded = load(Settings, given={"labels": {text: text}})
    assert tomllib.loads(render(loaded))["labels"] == {text: text}


@pytest.mark.slow
@settings(SETTLED, max_examples=200)
@given(ms=st.integers(1, 86_400_000), size=st.integers(2**10, 2**44))
def test_any_duration_and_size_is_printed_so_that_it_can_be_read(ms: int, size: int) -> None:
    loaded = load(Settings, given={"wait.short": ms / 1000, "buffer": size})
    raw = tomllib.loads(render(loaded))
    given_ = {"wait.short": raw["wait"]["short"], "buffer": raw["buffer"]}
    again = load(Settings, given=given_).settings
    assert again.wait.short_ms == ms and again.buffer == size


# ------------------------------------------------------------------------------------ reloading


def reload(file: Path, before: str, after: str, **given_: object) -> Reload[Settings]:
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
    assert change.loaded.settings.count == 2
    assert change.loaded.settings.listen == Place("h", 1)


def test_what_waits_for_a_restart_is_said_at_every_reload(file: Path) -> None:
    change = reload(file, "", 'listen = "n2:1"')
    assert compare(change.loaded, read(file, 'listen = "n2:1"')).waiting == ("listen",)
    assert compare(change.loaded, read(file, "")).lines == ()


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
        f"{file}: `wait.short` is above `wait.long`; give it less; while wait.long is still "
        "unchanged: restart instead of reloading"
    )


def test_settings_cannot_be_changed(file: Path) -> None:
    settings = read(file, 'count = 1\nlabels = { a = "b" }').settings
    with pytest.raises(AttributeError):
        settings.count = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        settings.labels["a"] = "c"  # type: ignore[index]


def test_a_pipe_will_do_as_a_file() -> None:
    here, there = os.pipe()
    os.write(there, b"count = 5")
    os.close(there)
    try:
        assert load(Settings, Path(f"/dev/fd/{here}")).settings.count == 5
    finally:
        os.close(here)
