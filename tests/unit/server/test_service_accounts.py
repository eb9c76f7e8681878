"""Callers identified by tokens of Kubernetes service accounts, with a real HTTPS issuer."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

jwt = pytest.importorskip("jwt", reason="PyJWT is in the extra oidc")

from rdzv.errors import (  # noqa: E402
    LimitExceededError,
    RendezvousConnectionError,
    UnauthenticatedError,
)
from rdzv.server.security import callers, service_accounts  # noqa: E402
from rdzv.server.security.callers import Caller, Role  # noqa: E402
from rdzv.server.security.service_accounts import ServiceAccounts, proving  # noqa: E402
from rdzv.server.settings.server_settings import (  # noqa: E402
    ROLES,
    Oidc,
    OidcAccount,
)
from tests.support.driven import settle  # noqa: E402
from tests.support.issuer import AUDIENCE, Issuer, Key, issuing  # noqa: E402

pytestmark = pytest.mark.slow

ACCOUNTS = (
    OidcAccount(namespace="team-a", roles=("submit",)),
    OidcAccount(namespace="team-a", name="shared", roles=("submit",), known_as="namespace"),
    OidcAccount(namespace="rdzv", name="agent", roles=("node",), known_as="node"),
)


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    with issuing(tmp_path / "issuer") as running:
        yield running


def oidc_of(issuer: Issuer, /, **more: Any) -> Oidc:
    return Oidc(**{"issuer": issuer.url, "audience": AUDIENCE, "account": ACCOUNTS} | more)


@asynccontextmanager
async def accounts_of(issuer: Issuer, **more: Any) -> AsyncIterator[ServiceAccounts]:
    async with proving(oidc_of(issuer, **{"ca": issuer.ca} | more)) as accounts:
        yield accounts


async def refusal(accounts: ServiceAccounts, token: str) -> str:
    with pytest.raises(UnauthenticatedError) as refused:
        await accounts.caller(token)
    assert token[-20:] not in str(refused.value), "no error quotes a token"
    return str(refused.value)


def made_by_hand(claims: object, algorithm: str, secret: bytes = b"", head: object = None) -> str:
    """Make a token that no library would make: unsigned, or signed with a shared secret."""

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    head = {"alg": algorithm, "kid": "one"} if head is None else head
    text = f"{part(json.dumps(head).encode())}.{part(json.dumps(claims).encode())}"
    return f"{text}.{part(hmac.digest(secret, text.encode(), 'sha256')) if secret else ''}"


async def test_a_token_says_who_calls_and_the_tables_what_it_may(issuer: Issuer) -> None:
    async with accounts_of(issuer) as accounts:
        submits = frozenset({Role.SUBMIT, Role.READ})
        proof = "service account team-a/train"
        assert await accounts.caller(issuer.token()) == Caller("train@team-a", submits, proof)
        shared = await accounts.caller(issuer.token("shared"))
        assert (shared.name, shared.proof) == ("team-a", "service account team-a/shared")
        agent = await accounts.caller(issuer.token("agent", namespace="rdzv", node="gpu-7"))
        assert (agent.name, agent.roles) == ("gpu-7", frozenset({Role.NODE}))


async def test_an_issuer_may_sign_with_rsa_and_have_other_keys_beside(issuer: Issuer) -> None:
    issuer.keys = [Key("rsa", "RS256"), Key("one")]
    issuer.keys[1].public = {"kty": "oct", "k": "c2VjcmV0", "kid": "one", "alg": "HS256"}
    async with accounts_of(issuer) as accounts:
        assert (await accounts.caller(issuer.token())).name == "train@team-a"


async def test_what_is_not_for_us_is_refused_with_both_values(issuer: Issuer) -> None:
    now = int(time.time())
    async with accounts_of(issuer, leeway_ms=30_000) as accounts:
        await accounts.caller(issuer.token(exp=now - 20))
        assert "expired at" in await refusal(accounts, issuer.token(exp=now - 40))
        await accounts.caller(issuer.token(nbf=now + 20, iat=now + 20))
        said = await refusal(accounts, issuer.token(nbf=now + 60))
        assert "is valid from" in said
        assert "compare the clocks" in said
        said = await refusal(accounts, issuer.token(aud=["vault", "api"]))
        assert "for audience 'vault', 'api', and this server wants 'rdzvd'" in said
        said = await refusal(accounts, issuer.token(iss="https://elsewhere"))
        assert (
            f"of issuer 'https://elsewhere', and this server accepts those of {issuer.url!r}"
            in (said)
        )
        for claim in ("exp", "aud", "sub"):
            assert f"has no {claim!r}" in await refusal(accounts, issuer.token(**{claim: None}))
        assert "'alice', which is no service" in await refusal(accounts, issuer.token(sub="alice"))
        said = await refusal(accounts, issuer.token("train", namespace="team-b"))
        assert (
            'team-b/train is not known here; add an [[oidc.account]] with namespace = "team-b"'
            in (said)
        )
        said = await refusal(
            accounts, issuer.token("agent", namespace="rdzv", **{"kubernetes.io": {}})
        )
        assert "does not name the node of its pod" in said


async def test_only_the_issuers_own_key_proves_anything(issuer: Issuer) -> None:
    async with accounts_of(issuer) as accounts:
        claims = issuer.claims()
        for algorithm in ("none", "HS256", "None"):
            assert f"signed by {algorithm!r}, which proves nothing" in await refusal(
                accounts, made_by_hand(claims, algorithm)
            )
        # The public key is public: as the secret of a symmetric signature it proves nothing.
        forged = made_by_hand(claims, "HS256", json.dumps(issuer.keys[0].public).encode())
        assert "'HS256', which proves nothing" in await refusal(accounts, forged)
        # The right key id with another key, also of another type.
        for other in (Key("one"), Key("one", "RS256")):
            assert "not signed with its issuer's key" in await refusal(
                accounts, issuer.token(key=other)
            )
        head, body, tail = issuer.token().split(".")
        admin = made_by_hand({**claims, "sub": "system:serviceaccount:rdzv:agent"}, "ES256")
        assert "not signed with its issuer's key" in await refusal(
            accounts, f"{head}.{admin.split('.')[1]}.{tail}"
        )
        assert "which key has signed it" in await refusal(
            accounts, jwt.encode(claims, issuer.keys[0].private, "ES256")
        )
        for damaged in ("a.b.c", "..", f"{head}.{body}", f"{head}.!.{tail}"):
            with pytest.raises(UnauthenticatedError, match="cannot be read"):
                await accounts.caller(damaged)


@pytest.mark.parametrize(
    ("head", "claims"),
    [
        ({"alg": ["ES256"], "kid": "one"}, {}),
        ({"alg": {"ES256": 1}, "kid": "one"}, {}),
        ({"alg": "ES256", "kid": 4}, {}),
        ({"alg": "ES256", "kid": "one", "crit": ["exp"]}, {}),
        ([], {}),
        ({"alg": "ES256", "kid": "one"}, []),
        ({"alg": "ES256", "kid": "one"}, None),
        ({"alg": "ES256", "kid": "one"}, {"iss": ["https://issuer"]}),
    ],
)
async def test_hostile_tokens_are_refused_and_nothing_else(
    issuer: Issuer, head: object, claims: object
) -> None:
    async with accounts_of(issuer) as accounts:
        await refusal(accounts, made_by_hand(claims, "ES256", b"secret", head=head))


async def test_a_token_of_many_brackets_is_refused(issuer: Issuer) -> None:
    async with accounts_of(issuer) as accounts:
        deep = base64.urlsafe_b64encode(b"[" * 2_700).decode()
        head = issuer.token().split(".")[0]
        for text in (f"{deep}.{deep}.AAAA", f"{head}.{deep}.AAAA"):
            assert callers.is_jwt(text)
            with pytest.raises(UnauthenticatedError, match="cannot be read"):
                await accounts.caller(text)


@pytest.mark.parametrize(
    "text", ["a.b.\udcff", "a.b.c.d", ".b.c", "a..c", "a.b\n.c", "rdzv_1_a", ""]
)
def test_what_is_no_jwt_is_left_to_the_other_tokens(text: str) -> None:
    assert not callers.is_jwt(text)


async def test_rotated_keys_are_fetched_when_a_token_names_one(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_accounts, "RETRY_S", 0.05)
    async with accounts_of(issuer) as accounts:
        await accounts.caller(issuer.token())
        old, issuer.keys = issuer.token(), [Key("two")]
        assert (await accounts.caller(issuer.token())).name == "train@team-a"
        assert "key 'one', which" in await refusal(accounts, old)


async def test_unknown_keys_make_no_more_than_one_request_each_while(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then unknown whether the key exists, so the caller is asked to try again."""
    monkeypatch.setattr(service_accounts, "MOST_WAITING", 5)
    async with accounts_of(issuer) as accounts:
        await accounts.caller(issuer.token())
        monkeypatch.setattr(service_accounts, "HOLD_S", 0.05)
        strangers = [issuer.token(key=Key(f"x{number}")) for number in range(8)]
        ends = await asyncio.gather(*map(accounts.caller, strangers), return_exceptions=True)
        assert [type(end) for end in ends] == [
            *[RendezvousConnectionError] * 5,
            *[LimitExceededError] * 3,
        ]
        assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]


async def test_known_keys_go_on_while_the_issuer_is_away(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_accounts, "RETRY_S", 0.02)
    # Each call ends with the fetch that it waits for; how long that takes depends on the machine.
    monkeypatch.setattr(service_accounts, "HOLD_S", 60.0)
    monkeypatch.setattr(service_accounts, "FETCH_WITHIN_S", 60.0)
    with caplog.at_level(logging.INFO, "rdzv.access"):
        async with accounts_of(issuer) as accounts:
            good = issuer.token()
            await accounts.caller(good)
            issuer.away = True
            with pytest.raises(RendezvousConnectionError, match="answers 503; try again"):
                await accounts.caller(issuer.token(key=Key("two")))
            assert (await accounts.caller(good)).name == "train@team-a"
            issuer.away, issuer.keys = False, [*issuer.keys, Key("three")]
            await accounts.caller(issuer.token(key=issuer.keys[1]))
    lines = [record.getMessage() for record in caplog.records]
    assert [lines[0], lines[2]] == [
        f"fetched the keys of {issuer.url}: one",
        f"fetched the keys of {issuer.url}: one, three",
    ]
    assert lines[1].startswith(f"cannot fetch the keys of {issuer.url}: ")
    assert re.search("answers 503; known keys stay valid for (1 d|23 h)", lines[1])


async def test_keys_are_not_kept_for_ever(issuer: Issuer) -> None:
    """Otherwise a stolen and replaced key would stay valid while the issuer is unreachable."""
    at = 1_000.0
    keys: service_accounts.Keys = {"one": jwt.PyJWK.from_dict(issuer.keys[0].public)}

    async def fetch() -> service_accounts.Keys:
        if at > 1_000:
            raise service_accounts.FetchError("no answer")
        return keys

    held = service_accounts.IssuerKeys(fetch, "https://issuer", kept_s=3600, now_s=lambda: at)
    following = asyncio.create_task(held.follow())
    await held.key("one")
    at += 3600
    await held.key("one")
    at += 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service_accounts, "HOLD_S", 0.01)
        with pytest.raises(RendezvousConnectionError):
            await held.key("one")
    following.cancel()


class Fetches:
    """The keys of an issuer that the test hands out, fetch by fetch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, key: Any, hold_s: float = 10.0) -> None:
        monkeypatch.setattr(service_accounts, "RETRY_S", 0.0)
        monkeypatch.setattr(service_accounts, "HOLD_S", hold_s)
        self._key = key
        self._answers: asyncio.Queue[tuple[str, ...] | None] = asyncio.Queue()
        self.begun = 0
        self.keys = service_accounts.IssuerKeys(self._fetch, "https://issuer", kept_s=7_200)
        self.following = asyncio.create_task(self.keys.follow())

    async def _fetch(self) -> service_accounts.Keys:
        self.begun += 1
        if (kids := await self._answers.get()) is None:
            raise service_accounts.FetchError("no answer")
        return dict.fromkeys(kids, self._key)

    async def answer(self, *kids: str, fails: bool = False) -> None:
        self._answers.put_nowait(None if fails else kids)
        await settle()

    async def ask(self, kid: str) -> asyncio.Task[Any]:
        asked = asyncio.create_task(self.keys.key(kid))
        await settle()
        return asked


@pytest.fixture
async def fetches(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fetches]:
    made = Fetches(monkeypatch, jwt.PyJWK.from_dict(Key("any").public))
    await settle()
    yield made
    made.following.cancel()


@pytest.mark.quick
async def test_a_call_that_comes_during_a_fetch_is_woken_by_it_or_waits_for_the_next(
    fetches: Fetches,
) -> None:
    known, unknown = await fetches.ask("one"), await fetches.ask("two")
    await fetches.answer("one")
    assert known.done(), "its key has come"
    # The fetch that was under way may have been answered before the key was made.
    assert not unknown.done()
    assert fetches.begun == 2
    await fetches.answer("one", "two")
    assert unknown.done() and unknown.exception() is None
    # A call asks anew each time, and nobody's wish is left over.
    third = await fetches.ask("three")
    assert fetches.begun == 3
    await fetches.answer("one")
    with pytest.raises(UnauthenticatedError, match="signed with key 'three'"):
        await third
    assert fetches.begun == 3


@pytest.mark.quick
async def test_calls_that_have_waited_take_no_place_from_those_that_follow(
    fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_accounts, "MOST_WAITING", 1)
    for number in range(3):
        asked = await fetches.ask(f"k{number}")
        if number == 0:
            await fetches.answer()
        await fetches.answer(f"k{number}")
        assert asked.done() and asked.exception() is None


@pytest.mark.quick
async def test_after_a_fetch_that_failed_the_next_one_counts(fetches: Fetches) -> None:
    first = await fetches.ask("one")
    await fetches.answer(fails=True)
    # Until a fetch succeeds, one follows another.
    assert fetches.begun == 2
    await fetches.answer("one")
    assert first.done() and first.exception() is None
    assert fetches.begun == 2
    stranger = await fetches.ask("two")
    await fetches.answer("one")
    with pytest.raises(UnauthenticatedError, match="signed with key 'two'"):
        await stranger


async def test_a_fetch_has_a_deadline(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_accounts, "FETCH_WITHIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(service_accounts.FetchError, match=r"no answer within 0.1 s"):
            await service_accounts.fetch_keys(oidc_of(issuer, issuer=url, ca=issuer.ca))


async def test_a_fetch_that_fails_says_why(issuer: Issuer, tmp_path: Path) -> None:
    async def trouble(**more: Any) -> str:
        with pytest.raises(service_accounts.FetchError) as failed:
            await service_accounts.fetch_keys(oidc_of(issuer, **{"ca": issuer.ca} | more))
        return str(failed.value)

    assert "certificate verify failed" in await trouble(ca=None)
    issuer.wants_token = "of-rdzvd"
    assert "answers 403 (it wants a token: `oidc.token_file`)" in await trouble()
    shown = tmp_path / "token"
    assert "No such file" in await trouble(token_file=shown)
    shown.write_text("of-rdzvd\n")
    await service_accounts.fetch_keys(oidc_of(issuer, ca=issuer.ca, token_file=shown))
    issuer.calls_itself = "https://kubernetes.default.svc"
    assert "calls itself 'https://kubernetes.default.svc'; give that" in await trouble(
        token_file=shown
    )
    issuer.calls_itself, issuer.keys = None, []
    assert "no key that signatures can be checked with" in await trouble(token_file=shown)


def test_the_settings_know_the_roles() -> None:
    assert set(ROLES) == {role.value for role in Role}
