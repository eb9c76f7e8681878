"""`rdzvctl certs`: a small CA whose certificates name the caller and its role."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from fake_control import Capture

from rdzv.ctl.__main__ import run
from rdzv.transport.certificates import check_pair, read_certificate

pytestmark = pytest.mark.slow


def certs(capsys: Capture, *words: str, code: int = 0) -> str:
    got = run(["certs", *words])
    said = capsys.readouterr()
    assert got == code, said
    return said.out + said.err


@pytest.fixture
def folder(tmp_path: Path, capsys: Capture) -> Path:
    folder = tmp_path / "certs"
    said = certs(capsys, "init", "--dir", str(folder), "--server", "head,10.0.0.1")
    assert f"rdzvd --tls-cert {folder}/server.crt --tls-key {folder}/server.key" in said
    return folder


def test_names_and_roles_are_where_the_server_looks_for_them(folder: Path, capsys: Capture) -> None:
    certs(capsys, "node", "n1", "--dir", str(folder))
    words = ("client", "alice", "--role", "submit", "--role", "read", "--dir", str(folder))
    assert "alice, for submit and read" in certs(capsys, *words)
    for file, name, roles in (
        ("node-n1", "n1", ("node",)),
        ("client-alice", "alice", ("submit", "read")),
        ("server", "head", ()),
    ):
        found = read_certificate((folder / f"{file}.crt").read_bytes(), file)
        assert (found.common_name, found.organizations) == (name, roles)
        check_pair(folder / f"{file}.crt", folder / f"{file}.key", file)


@pytest.mark.quick
def test_keys_are_their_owners_alone(folder: Path) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"ca.crt": 0o644, "ca.key": 0o600, "server.crt": 0o644, "server.key": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_nothing_is_replaced_unless_that_is_said(folder: Path, capsys: Capture) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = ("--dir", str(folder), "--server", "head")
    for command in ("init", "server"):
        assert "--force replaces it" in certs(capsys, command, *again, code=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    certs(capsys, "server", *again, "--force")
    changed = {name for name, old in before.items() if (folder / name).read_bytes() != old}
    assert changed == {"server.crt", "server.key"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("node", "../n1"), "name '../n1' cannot be used"),
        (("node", "n" * 65), "up to 64 letters"),
        (("server", "--force", "--server", "head:29400"), "without a port"),
        (("server", "--force", "--server", ","), "no name of the server"),
        (("node", "n1", "--days", "9999"), "longer than the CA is valid"),
    ],
)
def test_what_can_not_be_used_is_refused(
    folder: Path, capsys: Capture, words: tuple[str, ...], said: str
) -> None:
    assert said in certs(capsys, *words, "--dir", str(folder), code=1)


@pytest.mark.quick
def test_a_folder_without_a_ca_is_said_to_have_none(tmp_path: Path, capsys: Capture) -> None:
    said = certs(capsys, "node", "n1", "--dir", str(tmp_path), code=1)
    assert (
        "ca.key cannot be read: No such file or directory; create a CA with `rdzvctl certs init`"
        in said
    )
    assert "no certificate is in" in certs(capsys, "show", "--dir", str(tmp_path), code=1)


def test_show_says_whose_they_are_and_how_long_they_are_valid(
    folder: Path, capsys: Capture
) -> None:
    words = ("client", "alice", "--role", "admin", "--days", "3", "--dir", str(folder))
    certs(capsys, *words)
    shown = certs(capsys, "show", "--dir", str(folder)).splitlines()
    assert " ".join(shown[0].split()) == "FILE KIND NAME ROLES VALID UNTIL ASKED FOR AS"
    # Sorted by the end of their validity.
    assert [line.split()[1] for line in shown[1:]] == ["caller", "server", "CA"]
    assert "admin" in shown[1] and "(2 days)" in shown[1]
    assert "head 10.0.0.1 localhost 127.0.0.1 ::1" in shown[2]
    assert certs(capsys, "show", str(folder / "ca.crt")).count("\n") == 2
