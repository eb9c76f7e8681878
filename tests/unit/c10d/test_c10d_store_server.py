"""What the process that serves torch's store reports, and what rdzvd does if it misbehaves.

The store here is a dict; the process is a script without torch.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdzv.c10d import facade, observations, store_server
from rdzv.c10d.facade import serving_c10d
from rdzv.c10d.store_server import Looks, UnreadableError
from rdzv.errors import InvalidRequestError, RendezvousError
from rdzv.runtime.clock import Clock
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.transport.endpoints import Listen
from tests.support.settings import rdzvd_settings

pytestmark = pytest.mark.slow


class FakeStore:
    """The part of a TCPStore that `Looks` uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.listed = 0
        self.read: list[str] = []

    def num_keys(self) -> int:
        return len(self.values)

    def list_keys(self) -> list[str]:
        self.listed += 1
        return list(self.values)

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self.read.append(key.removeprefix(store_server.PREFIX))
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def put(self, **jobs: str) -> None:
        for name, value in jobs.items():
            self.values[store_server.PREFIX + name] = value.encode("latin-1")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    """A store whose values are read as text, and are unreadable where they begin with `!`."""

    def read(value: bytes) -> tuple[dict[str, object], int]:
        if value.startswith(b"!"):
            raise UnreadableError(value[1:].decode())
        return {"is": value.decode(), "closed": value.startswith(b"closed")}, len(value)

    monkeypatch.setattr(store_server, "read_state", read)
    return FakeStore()


def told(looks: Looks) -> dict[str, str]:
    return {name: state["is"] for name, state in looks.answer()["states"].items()}


NOTHING = {"states": {}, "unreadable": {}, "gone": [], "left_out": 0}


def test_only_what_has_changed_is_told(store: FakeStore) -> None:
    looks = Looks(store)
    assert looks.answer() == NOTHING
    store.put(a="1", b="2")
    assert told(looks) == {"a": "1", "b": "2"}
    store.put(b="3")
    assert told(looks) == {"b": "3"}
    assert told(looks) == {}
    assert store.listed == 2


def test_the_keys_of_a_round_are_no_jobs(store: FakeStore) -> None:
    store.put(**{"a": "1", "a.0/MASTER_ADDR": "x", "a.12/torchelastic/role_info/0": "x"})
    store.put(**{"a/b.c": "2", "": "3", "n" * 2_000: "4"})
    store.values["other"] = b"5"
    assert told(Looks(store)) == {"a": "1", "a/b.c": "2"}


def test_a_job_that_is_closed_is_not_read_again(store: FakeStore) -> None:
    looks = Looks(store)
    store.put(a="closed", b="2")
    looks.answer()
    store.read.clear()
    store.put(a="changed", b="changed", c="3")
    assert told(looks) == {"b": "changed", "c": "3"}
    assert sorted(store.read) == ["b", "c"]


def test_a_job_whose_key_goes_is_told_and_may_come_again(store: FakeStore) -> None:
    looks = Looks(store)
    store.put(a="closed", b="2")
    looks.answer()
    store.values.clear()
    answer = looks.answer()
    assert (answer["states"], sorted(answer["gone"])) == ({}, ["a", "b"])
    store.put(a="1")
    assert told(looks) == {"a": "1"}


def test_a_key_that_goes_while_another_comes_is_found_in_the_end(store: FakeStore) -> None:
    looks = Looks(store)
    store.put(a="1")
    looks.answer()
    store.values.clear()
    store.put(b="2")
    for _ in range(store_server.LIST_ANYWAY_AFTER - 1):
        assert looks.answer() == NOTHING
    answer = looks.answer()
    assert (list(answer["states"]), answer["gone"]) == (["b"], ["a"])


def test_why_a_state_is_unreadable_is_told_once(store: FakeStore) -> None:
    looks = Looks(store)
    store.put(bad="!too long", fits="1", empty="")
    answer = looks.answer()
    assert (list(answer["states"]), answer["unreadable"]) == (["fits"], {"bad": "too long"})
    assert looks.answer() == NOTHING
    store.put(bad="repaired")
    assert told(looks) == {"bad": "repaired"}


def test_what_does_not_fit_into_an_answer_comes_with_the_next(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MOST_ANSWER_BYTES", 25)
    store.put(a="1" * 10, b="2" * 10, c="3" * 10, d="4" * 10)
    looks = Looks(store)
    answers = [list(looks.answer()["states"]) for _ in range(3)]
    assert answers == [["a", "b"], ["c", "d"], []]


def test_jobs_beyond_the_most_are_counted(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MOST_JOBS", 2)
    store.put(a="1", b="2")
    looks = Looks(store)
    looks.answer()
    store.put(**{"0": "new"})
    answer = looks.answer()
    assert (answer["states"], answer["left_out"]) == ({}, 1)
    # Closing one makes room.
    store.put(a="closed")
    looks.answer()
    store.put(x="makes it list")
    answer = looks.answer()
    assert (list(answer["states"]), answer["left_out"]) == (["0"], 1)


def test_a_store_that_can_not_be_listed_says_why() -> None:
    class Old(FakeStore):
        list_keys = None  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> object:
            if name == "list_keys":
                raise AttributeError("'TCPStore' object has no attribute 'list_keys'")
            return super().__getattribute__(name)

    assert Looks(Old()).answer() == {
        "error": "AttributeError: 'TCPStore' object has no attribute 'list_keys'"
    }


# ------------------------------------------------------------------------------------ the process

HEAD = f"""#!{sys.executable} -I
import json, os, sys, time
def say(answer): print(answer if isinstance(answer, str) else json.dumps(answer), flush=True)
def hear(): return sys.stdin.readline()
def serve(*answers):
    say("ready")
    for answer in answers:
        hear()
        say(answer)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RdzvdSettings]:
    """A configuration whose interpreter is `python` in the test's folder; time goes fast."""
    monkeypatch.setattr(facade, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(facade, "RESTART_AFTER_S", (0.01, 0.02))
    yield rdzvd_settings(
        data_dir=tmp_path,
        c10d=Listen("127.0.0.1", 0),
        c10d_python=tmp_path / "python",
    )


def script(config: RdzvdSettings, *lines: str) -> None:
    path = Path(config.c10d_python)
    path.write_text(HEAD + "\n".join(lines) + "\n")
    path.chmod(0o755)


async def until(what: str, holds: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"waited a minute until {what}")


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await until(f"it logs {text!r}", lambda: text in caplog.text)


async def test_nothing_is_served_unless_asked_for(tmp_path: Path) -> None:
    plain = rdzvd_settings(data_dir=tmp_path)
    async with serving_c10d(plain.c10d, plain.c10d_python, Clock()) as none:
        assert none is None


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["sys.exit('first line\\nlast words')"], "ended with exit code 1: last words"),
        (["os.kill(os.getpid(), 9)"], r"ended by signal 9 \(SIGKILL\)"),
        (["say({})", "hear()"], "did not serve"),
        (["print('x' * 2000, flush=True)", "hear()"], "sent an invalid answer"),
    ],
)
async def test_a_process_that_does_not_come_to_serve_is_an_error(
    lines: list[str], why: str, config: RdzvdSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facade, "MOST_ANSWER_BYTES", 1_000)
    script(config, *lines)
    with pytest.raises(RendezvousError, match=why):
        async with serving_c10d(config.c10d, config.c10d_python, Clock()):
            pass


@pytest.mark.slow
async def test_a_process_that_is_not_ready_in_time_is_an_error(
    config: RdzvdSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facade, "READY_TIMEOUT_S", 0.2)
    script(config, "time.sleep(600)")
    with pytest.raises(RendezvousError, match="was not ready within"):
        async with serving_c10d(config.c10d, config.c10d_python, Clock()):
            pass


async def test_an_interpreter_without_torch_is_refused(config: RdzvdSettings) -> None:
    script(config, "print('ModuleNotFoundError: no torch', file=sys.stderr)", "sys.exit(3)")
    with pytest.raises(InvalidRequestError, match=r"no torch\); install rdzv\[torch\] beside"):
        async with serving_c10d(config.c10d, config.c10d_python, Clock()):
            pass


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("'nonsense'", "sent an invalid answer"),
        ("{'states': []}", "sent an invalid answer"),
    ],
)
async def test_a_process_that_answers_nonsense_is_replaced(
    answer: str, why: str, config: RdzvdSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rdzv.c10d")
    script(config, f"serve({{'states': {{'a': None}}}}, {answer})", "hear()")
    async with serving_c10d(config.c10d, config.c10d_python, Clock()) as served:
        assert served is not None
        await until_logged(caplog, "serving a new, empty store")
        assert why in caplog.text
        assert "launch them again: a" in caplog.text


async def test_what_it_tells_is_shown_and_a_slow_answer_is_waited_for(
    config: RdzvdSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facade, "SLOW_AFTER_S", 0.05)
    go = config.data_dir / "go"
    script(
        config,
        "odd = {'states': {'a': None, 'c': {'round': -1}}, 'unreadable': {'b': ''}, 'left_out': 7}",
        "serve(odd, {'error': 'no'})",
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)",
        "hear(); say({'gone': ['a']}); hear(); hear()",
    )
    async with serving_c10d(config.c10d, config.c10d_python, Clock()) as served:
        assert served is not None
        await until_logged(caplog, "has not answered for")
        assert [view.rdzv_id for view in served.views()] == ["a"]
        assert "cannot show the state of job 'b'" in caplog.text
        assert "cannot show the state of job 'c': Expected `int` >= 0" in caplog.text
        assert "7 jobs in torch's store exceed the limit" in caplog.text
        assert "cannot be listed: no" in caplog.text
        go.touch()
        await until("a is gone", lambda: served.view("a") is None)


async def test_a_bug_in_a_look_costs_nobody_the_store(
    config: RdzvdSettings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*look: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(observations.Watch, "take", broken)
    script(config, "say('ready')", "while hear(): say({})")
    async with serving_c10d(config.c10d, config.c10d_python, Clock()):
        await until_logged(caplog, "please report it: lost one check")
    assert "have lost their store" not in caplog.text


def test_where_libuv_takes_no_listening_socket_the_older_server_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.4, where rdzvd did not start."""

    class Torch:
        @staticmethod
        def TCPStore(*where: object, use_libuv: bool = True, **options: object) -> str:  # noqa: N802
            if use_libuv:
                raise NotImplementedError("the libuv back-end does not support a listen fd")
            return "served"

    monkeypatch.setattr(store_server.importlib, "import_module", lambda name: Torch)
    monkeypatch.setattr(store_server.os, "environ", {})
    monkeypatch.setattr(store_server.sys, "path", [])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert store_server.serve(listening.fileno()) == "served"
