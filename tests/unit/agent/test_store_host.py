"""The store host creates its store on the given socket, with whatever API torch offers there."""

from __future__ import annotations

import runpy
import socket
from pathlib import Path
from typing import Any

import pytest

import rdzv.agent.job_programs

PROGRAM = Path(rdzv.agent.job_programs.__path__[0]) / "store_host.py"


def serve(store_type: Any, monkeypatch: pytest.MonkeyPatch) -> object:
    """Let the program serve a socket with a fake of torch's store; return the store."""
    program = runpy.run_path(str(PROGRAM), run_name="store_host")
    own = program["serve"].__globals__
    monkeypatch.setitem(own, "import_store_type", lambda *, whole_torch: store_type)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made: object = program["serve"](listening.fileno(), whole_torch=False)
    return made


@pytest.mark.parametrize(("wanted", "kind"), [(None, True), ("1", True), ("0", False)])
def test_the_store_is_of_the_kind_that_its_clients_are(
    wanted: str | None, kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if wanted is not None:
        monkeypatch.setenv("USE_LIBUV", wanted)
    asked = serve(lambda *where, **options: options, monkeypatch)
    assert isinstance(asked, dict) and asked["use_libuv"] is kind


def test_without_libuvs_socket_the_older_server_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.4: the store host failed, and three rounds with it, before RANK 0 served."""

    def store(*where: object, use_libuv: bool, **options: object) -> str:
        if use_libuv:
            raise NotImplementedError("the libuv back-end does not support a listen fd")
        return "served"

    monkeypatch.delenv("USE_LIBUV", raising=False)
    assert serve(store, monkeypatch) == "served"
