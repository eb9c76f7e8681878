"""The error file of a failed worker is understood, whatever is in it."""

import importlib.util
import json
import os
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rdzv.agent.system.error_files import (
    MAX_FILE_BYTES,
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_CHARS,
    NO_ERROR_FILE,
    read_error,
    signal_name,
)

SIGKILL = 9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "error.json"


def torchs_error_handler() -> ModuleType:
    """Load the code that writes torchelastic's error files, without the rest of torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("torch is not installed")
    file = "distributed/elastic/multiprocessing/errors/error_handler.py"
    spec = importlib.util.spec_from_file_location("handler", Path(torch.origin).parent / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_torchs_error_file_is_understood(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    handler = torchs_error_handler().ErrorHandler()
    try:
        raise ValueError("batch 17 is empty")
    except ValueError as error:
        handler.record_exception(error)
    found = read_error(path, None, 7)
    assert found.message == "ValueError: batch 17 is empty"
    assert found.traceback.startswith("Traceback (most recent call last):")
    assert found.traceback.endswith("ValueError: batch 17 is empty")


def write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document))


def test_the_form_without_a_traceback_is_understood(path: Path) -> None:
    write(path, {"message": "out of memory", "timestamp": 1700000000})
    found = read_error(path, None, 7)
    assert (found.message, found.traceback) == ("out of memory", "")


@pytest.mark.parametrize(
    ("document", "message", "traceback"),
    [
        ({"message": {"message": "E: x"}}, "E: x", ""),
        ({"message": {"message": "E: x", "extraInfo": None}}, "E: x", ""),
        ({"message": {"message": "E: x", "extraInfo": "?"}}, "E: x", ""),
        ({"message": {"message": "E: x", "extraInfo": {"py_callstack": None}}}, "E: x", ""),
        ({"message": {"message": "E: x", "extraInfo": {"py_callstack": ["a"]}}}, "E: x", "['a']"),
        ({"message": {"message": " E: x\n"}}, "E: x", ""),
        ({"message": {"message": 4}}, "4", ""),
        ({"message": ["a", 1]}, "['a', 1]", ""),
        ({"message": {}}, NO_ERROR_FILE, ""),
        ({"message": {"message": None}}, NO_ERROR_FILE, ""),
        ({"message": ""}, NO_ERROR_FILE, ""),
        ({"message": None}, NO_ERROR_FILE, ""),
    ],
)
def test_whatever_json_is_in_it_becomes_text(
    path: Path, document: object, message: str, traceback: str
) -> None:
    write(path, document)
    found = read_error(path, None, 7)
    assert (found.message, found.traceback) == (message, traceback)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"[1]",
        b"null",
        b"3",
        b'"text"',
        b'{"timestamp": 1}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"message": ' + b"9" * 5_000 + b"}",
    ],
    ids=lambda content: repr(content[:9]),
)
def test_a_file_that_is_something_else_is_shown(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = read_error(path, None, 7)
    shown = content.decode(errors="replace")[:200]
    assert found.message == f"the error file is not torchelastic's JSON: {shown!r}"
    assert found.traceback == ""


@pytest.mark.parametrize(
    ("content", "blocks", "free", "told"),
    [
        (b"", 9, 0, "the error file is empty; the disk of {} is full, so its log may be cut off"),
        (
            b'{"mess',
            9,
            0,
            "the error file is not torchelastic's JSON: '{{\"mess'; the disk of {} is ",
        ),
        (b"", 9, 1, "the error file is empty"),
        (b"", 0, 0, "the error file is empty"),  # A file system that does not count its blocks.
    ],
)
def test_a_file_that_a_full_disk_has_cut_off_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, blocks: int, free: int, told: str
) -> None:
    path.write_bytes(content)
    disk = SimpleNamespace(f_blocks=blocks, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    found = read_error(path, None, 7).message
    assert found.startswith(told.format(path))
    assert ("make room" in found) is (blocks > free == 0)


def test_long_texts_are_cut_where_they_say_least(path: Path) -> None:
    extra = {"py_callstack": "first " + "." * MAX_TRACEBACK_CHARS + " last"}
    write(path, {"message": {"message": "E: " + "x" * MAX_MESSAGE_CHARS, "extraInfo": extra}})
    found = read_error(path, None, 7)
    assert len(found.message) == MAX_MESSAGE_CHARS
    assert found.message.startswith("E: ")
    assert len(found.traceback) == MAX_TRACEBACK_CHARS
    assert found.traceback.endswith(" last")


@pytest.mark.slow
def test_a_huge_file_is_not_read_whole(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"message": "')
        file.truncate(MAX_FILE_BYTES * 1_000)
    assert read_error(path, None, 7).message.startswith("the error file is not torchelastic's")


def test_without_a_file_the_message_says_where_to_look() -> None:
    found = read_error(Path("/nowhere/error.json"), None, 7)
    assert (found.message, found.traceback, found.age_ms) == (NO_ERROR_FILE, "", 0)
    assert "its output may say why" in NO_ERROR_FILE


@pytest.mark.parametrize(("signum", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (99, "signal 99")])
def test_without_a_file_a_signal_is_named(path: Path, signum: int, name: str) -> None:
    assert signal_name(signum) == name
    assert read_error(path, signum, 4711).message == f"received {name} (pid 4711)"


def test_a_file_that_can_not_be_read_is_the_message(path: Path) -> None:
    path.mkdir()
    found = read_error(path, SIGKILL, 7)
    assert found.message.startswith("cannot read the error file: ")
    assert found.age_ms == 0


def test_a_fifo_in_its_place_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    assert "no regular file" in read_error(path, None, 7).message


def test_the_failure_is_as_old_as_its_file(path: Path) -> None:
    write(path, {"message": "x"})
    then_s = path.stat().st_mtime - 60
    os.utime(path, (then_s, then_s))
    assert 60_000 <= read_error(path, None, 7).age_ms < 90_000


def test_a_file_from_the_future_is_no_younger_than_now(path: Path) -> None:
    write(path, {"message": "x"})
    then_s = time.time() + 3_600
    os.utime(path, (then_s, then_s))
    assert read_error(path, None, 7).age_ms == 0
