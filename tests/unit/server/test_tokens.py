"""Tokens: created once, stored as hashes, valid until they expire or are revoked."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    RendezvousStateError,
    UnauthenticatedError,
    UnknownTokenError,
)
from rdzv.server.driver import Driver
from rdzv.server.security import callers, tokens
from rdzv.server.security.callers import Caller, Role
from rdzv.stores.memory import MemoryStore
from rdzv.transport.certificates import read_certificate
from tests.support.driven import FakeClock, settle
from tests.support.settings import rdzvd_settings

HOUR_MS = 3_600_000


@asynccontextmanager
async def driving(
    store: MemoryStore, clock: FakeClock | None = None, **config_as: Any
) -> AsyncIterator[Driver]:
    given = {"auth": "required", **config_as}
    config = rdzvd_settings(**given)
    async with Driver.running(store, clock or FakeClock(), config) as driver:
        yield driver


async def stored(store: MemoryStore) -> str:
    found = await store.load_document(tokens.TOKENS)
    assert found is not None
    return found[0].decode()


@pytest.mark.slow
async def test_a_token_says_who_calls_also_after_a_restart_and_is_stored_as_a_hash() -> None:
    store = MemoryStore()
    async with driving(store) as driver:
        token, text = await driver.tokens.create("ada", [Role.SUBMIT], 0)
    secret = text.split("_", 2)[2]
    assert secret not in await stored(store)
    async with driving(store) as driver:
        caller = driver.tokens.caller(text)
    proof = f"token {token.id}"
    assert caller == Caller("ada", frozenset({Role.SUBMIT, Role.READ}), proof, token.id)
    assert str(caller) == f"ada (token {token.id})"
    assert caller.shown == "submit"


@pytest.mark.parametrize("change", ["", "x", "rdzv_", "rdzv_00000000_" + 43 * "a", "\udcff"])
async def test_what_is_no_token_of_ours_says_nothing_of_itself(change: str) -> None:
    async with driving(MemoryStore()) as driver:
        _, text = await driver.tokens.create("ada", [Role.SUBMIT], 0)
        wrong = [change, text[:-1], f"{text}a", text[:-1] + ("A" if text[-1] != "A" else "B")]
        for one in wrong:
            with pytest.raises(UnauthenticatedError) as refused:
                driver.tokens.caller(one)
            assert text[14:] not in str(refused.value)


async def test_a_token_expires() -> None:
    clock = FakeClock()
    async with driving(MemoryStore(), clock) as driver:
        token, text = await driver.tokens.create("ada", [Role.READ], HOUR_MS)
        clock.at_ms += HOUR_MS - 1
        driver.tokens.caller(text)
        clock.at_ms += 1
        with pytest.raises(UnauthenticatedError, match=f"token {token.id} of ada has expired"):
            driver.tokens.caller(text)
        # It stays listed for a while, so that people see why; then the next one takes its place.
        assert driver.tokens.listed()[0].id == token.id
        clock.at_ms += tokens.EXPIRED_KEPT_MS + HOUR_MS
        await driver.tokens.create("ada", [Role.READ], HOUR_MS)
        assert token.id not in {one.id for one in driver.tokens.listed()}


async def test_one_is_rotated_while_the_other_is_good() -> None:
    async with driving(MemoryStore()) as driver:
        first, old = await driver.tokens.create("ada", [Role.SUBMIT], 0)
        _, new = await driver.tokens.create("ada", [Role.SUBMIT], 0)
        await driver.tokens.revoke(first.id)
        assert driver.tokens.caller(new).name == "ada"
        with pytest.raises(UnauthenticatedError):
            driver.tokens.caller(old)
        await driver.tokens.revoke("ada")
        with pytest.raises(UnauthenticatedError):
            driver.tokens.caller(new)
        with pytest.raises(UnknownTokenError, match="there is no token ada"):
            await driver.tokens.revoke("ada")


async def test_when_it_was_used_is_stored_now_and_then() -> None:
    store, clock = MemoryStore(), FakeClock()
    async with driving(store, clock) as driver:
        _, text = await driver.tokens.create("ada", [Role.READ], 0)
        assert driver.tokens.listed()[0].used_ms is None
        driver.tokens.caller(text)
        await settle()
        used_ms = json.loads(await stored(store))["tokens"][0]["used_ms"]
        assert used_ms == clock.now_ms()
        revision = (await store.load_document(tokens.TOKENS) or (b"", 0))[1]
        clock.at_ms += HOUR_MS // 2
        driver.tokens.caller(text)
        await settle()
        assert (await store.load_document(tokens.TOKENS) or (b"", 0))[1] == revision
        # Then again, and what is stored of the tokens otherwise takes nothing of it back.
        clock.at_ms += HOUR_MS
        driver.tokens.caller(text)
        await settle()
        assert json.loads(await stored(store))["tokens"][0]["used_ms"] == clock.now_ms()
        await driver.tokens.create("bob", [Role.READ], 0)
        kept = {one["name"]: one["used_ms"] for one in json.loads(await stored(store))["tokens"]}
        assert kept == {"ada": clock.now_ms(), "bob": None}
        assert [one.used_ms for one in driver.tokens.listed()] == [clock.now_ms(), None]


async def test_a_use_while_the_tokens_are_being_stored_is_not_forgotten() -> None:
    class Slow(MemoryStore):
        may_write = asyncio.Event()

        async def swap_document(self, name: str, data: bytes, revision: int) -> int:
            await self.may_write.wait()
            return await super().swap_document(name, data, revision)

    store, clock = Slow(), FakeClock()
    store.may_write.set()
    async with driving(store, clock) as driver:
        _, text = await driver.tokens.create("ada", [Role.READ], 0)
        store.may_write.clear()
        creating = asyncio.create_task(driver.tokens.create("bob", [Role.READ], 0))
        await settle()
        clock.at_ms += 5
        driver.tokens.caller(text)
        store.may_write.set()
        await creating
        assert [one.used_ms for one in driver.tokens.listed()] == [clock.now_ms(), None]


async def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.server.security.tokens.TOKENS_AT_ONCE", 1)
    async with driving(MemoryStore()) as driver:
        await driver.tokens.create("ada", [Role.READ], 0)
        with pytest.raises(LimitExceededError, match="there are 1 tokens, which is the limit"):
            await driver.tokens.create("bob", [Role.READ], 0)


@pytest.mark.slow
async def test_the_first_admins_token_is_made_once(tmp_path: Path) -> None:
    file, store = tmp_path / "admin", MemoryStore()
    async with driving(store, init_admin_token=file) as driver:
        text = file.read_text().strip()
        assert driver.tokens.caller(text).admin
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink()
    async with driving(store, init_admin_token=file) as driver:
        assert driver.tokens.caller(text).admin
        assert not file.exists(), "there is an admin"
        await driver.tokens.revoke("admin")
    # Nobody can administer any more, except with the token file or a new token.
    async with driving(store, init_admin_token=file) as driver:
        assert driver.tokens.caller(file.read_text().strip()).admin


async def test_a_server_that_refuses_every_call_says_how_to_change_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, clock = MemoryStore(), FakeClock()
    refused = "every call is refused: there is no token"
    for told in (True, False):
        caplog.clear()
        async with driving(store, clock) as driver:
            assert (refused in caplog.text) is told
            await driver.tokens.create("n1", [Role.NODE], 12 * HOUR_MS)
    clock.at_ms += 12 * HOUR_MS  # Both have expired.
    async with driving(store, clock):
        assert refused in caplog.text


async def test_an_admin_whose_token_has_expired_is_none(tmp_path: Path) -> None:
    file, store, clock = tmp_path / "admin", MemoryStore(), FakeClock()
    async with driving(store, clock) as driver:
        await driver.tokens.create("ada", [Role.ADMIN], 12 * HOUR_MS)
    clock.at_ms += 12 * HOUR_MS - 1
    async with driving(store, clock, init_admin_token=file):
        assert not file.exists()
    clock.at_ms += 1
    async with driving(store, clock, init_admin_token=file) as driver:
        assert driver.tokens.caller(file.read_text().strip()).admin


async def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text("my shopping list")
    with pytest.raises(InvalidRequestError, match="holds no token"):
        async with driving(MemoryStore(), init_admin_token=file):
            pass
    assert file.read_text() == "my shopping list"


async def test_nobody_opens_a_server_by_leaving_a_flag_out() -> None:
    store = MemoryStore()
    async with driving(store) as driver:
        await driver.tokens.create("ada", [Role.READ], 0)
    with pytest.raises(InvalidRequestError, match="start it with --auth=required"):
        async with driving(store, auth="none"):
            pass


@pytest.mark.parametrize("data", [b"no json", b'{"format":2,"tokens":[]}', b'{"tokens":[{}]}'])
def test_what_can_not_be_read_is_left_alone(data: bytes) -> None:
    with pytest.raises(RendezvousStateError):
        tokens.decode(data)


# ------------------------------------------------------------------ certificates


def certificate(tmp_path: Path, name: str, *roles: str) -> bytes:
    from rdzv.ctl.authority import Authority

    authority = Authority.make(tmp_path, 30, replace=False)
    made = authority.caller("client", name, roles, 1, replace=False)
    return made.cert.read_bytes()


@pytest.mark.slow
def test_a_certificate_says_who_calls(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "ada", "submit", "Example GmbH", "read")
    assert "Example GmbH" in read_certificate(pem, "it").organizations
    caller = callers.certified(pem)
    assert (caller.name, caller.proof) == ("ada", "certificate")
    assert caller.roles == {Role.SUBMIT, Role.READ}


def test_a_certificate_without_a_name_of_a_caller_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other authorities create such certificates.
    monkeypatch.setattr("rdzv.ctl.authority.CALLER_NAME", re.compile(".*"))
    with pytest.raises(UnauthenticatedError, match="has the common name 'Ada Lovelace'"):
        callers.certified(certificate(tmp_path, "Ada Lovelace", "admin"))


@pytest.mark.parametrize(
    ("header", "text"), [("Bearer x", "x"), ("bearer  x ", "x"), ("Basic x", ""), ("Bearer", "")]
)
def test_a_header_carries_a_token_or_is_refused(header: str, text: str) -> None:
    if text:
        assert callers.bearer(header) == text
        return
    with pytest.raises(UnauthenticatedError, match="carries no token"):
        callers.bearer(header)
