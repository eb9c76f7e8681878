"""Certificates for the tests: valid ones, and some that must be refused."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from rdzv.ctl import authority
from rdzv.ctl.authority import Authority
from rdzv.server.settings.server_settings import TlsSettings
from rdzv.transport.channels import Credentials


class Files:
    """A CA in a folder, and the certificates that it signed."""

    def __init__(self, folder: Path, *hosts: str) -> None:
        self.folder = folder
        self.authority = Authority.make(folder, 30, replace=False)
        self.renew_server(*hosts, replace=False)

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def server(self, *, client_ca: bool = True) -> TlsSettings:
        cert, key = self.folder / "server.crt", self.folder / "server.key"
        return TlsSettings(cert=cert, key=key, client_ca=self.ca if client_ca else None)

    def renew_server(self, *hosts: str, replace: bool = True) -> None:
        self.authority.server(hosts or ("127.0.0.1",), 20, replace=replace)

    def node(self, name: str, *, replace: bool = False) -> Credentials:
        made = self.authority.caller("node", name, ("node",), 20, replace=replace)
        return Credentials(self.ca, made.cert, made.key)

    def client(self, name: str, *roles: str, days: int = 20) -> Credentials:
        made = self.authority.caller("client", name, roles, days, replace=False)
        return Credentials(self.ca, made.cert, made.key)

    def expired_client(self, name: str, monkeypatch: pytest.MonkeyPatch) -> Credentials:
        with monkeypatch.context() as patched:
            patched.setattr(authority, "CLOCKS_APART", timedelta(days=3))
            return self.client(name, "admin", days=-1)

    def expire_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(authority, "CLOCKS_APART", timedelta(days=3))
            self.authority.server(("127.0.0.1",), -1, replace=True)


def put(source: Path, target: Path) -> None:
    """Replace a file atomically, as tools that renew certificates do."""
    beside = target.with_name(f"{target.name}.new")
    beside.write_bytes(source.read_bytes())
    beside.chmod(source.stat().st_mode & 0o777)
    os.replace(beside, target)  # noqa: PTH105
