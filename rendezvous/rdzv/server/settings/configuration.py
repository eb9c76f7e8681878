"""rdzvd's configuration from its start through all reloads: read, checked and applied.

The file and the command line accept the same settings, and the command line takes precedence. A
reload changes the settings that all parts of the server hold, so the parts do not need to know
about reloads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from rdzv.errors import InvalidRequestError
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.setting_types import settings_of
from rdzv.settings.toml_files import Loaded, compare, load
from rdzv.transport.endpoints import DEFAULT_PORT, Listen

log = logging.getLogger("rdzv.server")

DEFAULT_FILE = Path("/etc/rdzv/rdzvd.toml")

_EXAMPLE = f"127.0.0.1:{DEFAULT_PORT}"


def check(settings: RdzvdSettings) -> None:
    for listen, what in ((settings.listen, ""), (settings.http, "--http ")):
        if listen and not listen.loopback and not settings.insecure and settings.open:
            raise InvalidRequestError(
                f"{what}{listen} can be reached from other machines, and {settings.open}; listen "
                f"on loopback ({_EXAMPLE}), {_remedy(settings)}, or give --insecure if anyone who "
                "can reach this port may run and end jobs"
            )
    if settings.tls.pair is not None:
        settings.tls.check()
    if not settings.authenticates:
        _check_open(settings)
    if settings.oidc.issuer is not None:
        settings.oidc.check()
    if settings.notify.url_file is not None:
        settings.notify.read_url()
    _check_replica(settings)
    if settings.c10d is not None:
        _check_c10d(settings, settings.c10d)


def _remedy(settings: RdzvdSettings) -> str:
    if settings.tls.pair is None:
        also = "" if settings.authenticates else " and --tls-client-ca"
        return f"give --tls-cert, --tls-key{also} (`rdzvctl certs` makes them)"
    return "give --tls-client-ca (`rdzvctl certs` makes one) or --auth=required"


def _check_open(settings: RdzvdSettings) -> None:
    """Refuse what would be of no use where no caller needs to authenticate."""
    tls = settings.tls
    if tls.pair is not None and (tls.token_listen or tls.http_client_auth != "require"):
        raise InvalidRequestError(
            "--tls-token-listen and --tls-http-client-auth=accept are for callers with a "
            "token in place of a certificate, and no caller would need one; give "
            "--auth=required with it"
        )
    if settings.init_admin_token is not None:
        raise InvalidRequestError(
            "--init-admin-token makes a token, and no caller would need one; give "
            "--auth=required with it"
        )


def _check_replica(settings: RdzvdSettings) -> None:
    """Refuse a server on a shared store if nodes of the other servers could not reach it."""
    etcd = settings.etcd.config()
    if (settings.store == "etcd") != (etcd is not None):
        raise InvalidRequestError(
            "--store=etcd and --etcd-endpoints=HOST:PORT,... go together; one is missing"
        )
    at = settings.advertise or settings.listen
    if etcd is not None and (at.unspecified or (settings.advertise and not at.port)):
        raise InvalidRequestError(
            f"{at} is not an address at which others reach this server, and with a shared "
            "store they get it; give --advertise=HOST:PORT"
        )


def _check_c10d(settings: RdzvdSettings, c10d: Listen) -> None:
    if not c10d.loopback and not settings.insecure:
        raise InvalidRequestError(
            f"--c10d {c10d} can be reached from other machines, and torch's store encrypts and "
            f"authenticates nothing; give a loopback address ({_EXAMPLE}), or give --insecure "
            "if anyone who can reach this port may run code on the nodes of its jobs"
        )
    if c10d == settings.listen and c10d.port:
        raise InvalidRequestError(
            f"--c10d {c10d} is where --listen has nodes and operators connect; give one of "
            "them another port (torchrun's default for c10d is 29400)"
        )


class Configuration:
    """The configuration of one rdzvd, from its start through all reloads."""

    def __init__(self, file: Path | None, given: Mapping[str, object]) -> None:
        self._file = file or _default_file()
        self._given = given
        self.loaded = load(RdzvdSettings, self._file, given)
        check(self.settings)

    @property
    def settings(self) -> RdzvdSettings:
        """The settings in effect: one object, however often they are reloaded."""
        return self.loaded.settings

    @property
    def source(self) -> str:
        given = any(value is not None for value in self._given.values())
        parts = [str(self._file)] if self._file else []
        parts += ["the command line"] if given else []
        return " and ".join(parts) or "defaults"

    def reload(self, set_up_logging: Callable[[str, str], None]) -> bool:
        """Read the file again, apply what can be applied, and log the outcome.

        Return whether the file is valid. If it is not, nothing is changed.
        """
        file = self._file or _default_file()
        try:
            wanted = load(RdzvdSettings, file, self._given)
            # Files named in the configuration may be unusable, too.
            check(wanted.settings)
            change = compare(self.loaded, wanted)
        except InvalidRequestError as error:
            log.error("did not reload the configuration; nothing was changed: %s", error)
            return False
        for setting in map(settings_of(RdzvdSettings).__getitem__, change.applied):
            setting.alter(self.settings, setting.of(change.loaded.settings))
        self._file, self.loaded = file, Loaded(self.settings, change.loaded.sources)
        for line in change.lines:
            log.warning("configuration: %s", line)
        if not {"log_level", "log_format"}.isdisjoint(change.applied):
            set_up_logging(self.settings.log_level, self.settings.log_format)
        log.info(
            "reloaded the configuration from %s: %d applied, %d waiting for a restart",
            *(self.source, len(change.applied), len(change.waiting)),
        )
        return True


def _default_file() -> Path | None:
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None
