"""Builds rdzvd's `Config` from its settings, and reloads it.

The file and the command line accept the same settings, and the command line takes precedence. A
reload changes the `Limits` and `Timings` that all parts of the server hold (`config.alter`), so the
parts do not need to know about reloads.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rdzv.errors import InvalidRequestError
from rdzv.server.settings.config import (
    Config,
    Limits,
    Notify,
    Oidc,
    OidcAccount,
    Timings,
    TlsFiles,
    alter,
    default_data_dir,
)
from rdzv.server.settings.server_settings import PARTS, RdzvdSettings
from rdzv.settings.setting_types import Setting, settings_of
from rdzv.settings.toml_files import compare, load

if TYPE_CHECKING:
    from rdzv.stores.etcd_config import EtcdConfig

log = logging.getLogger("rdzv.server")

DEFAULT_FILE = Path("/etc/rdzv/rdzvd.toml")
"""The file that is read if it exists and no other file is named."""


def make_config(settings: RdzvdSettings) -> Config:
    """Build the configuration with which the server runs, and check all of it.

    Raises:
        InvalidRequestError: a file named in the settings is unusable, or settings contradict each
            other.

    """
    auth, tls = settings.auth, settings.tls
    parts: dict[str, Any] = {name: {} for name in PARTS}
    for setting in settings_of(RdzvdSettings).values():
        for part, name in (field.split(".") for field in setting.sets):
            parts[part][name] = _field_value(setting, settings)
    config = Config(
        listen=settings.listen,
        data_dir=settings.data_dir or default_data_dir(),
        store=settings.store,
        insecure=settings.insecure,
        tls=_tls_files(settings),
        advertise=settings.advertise,
        # If callers can authenticate by certificate or service account, they must authenticate.
        auth=auth == "required" if auth else bool(tls.client_ca or settings.oidc.issuer),
        oidc=_oidc(settings),
        init_admin_token=settings.init_admin_token,
        etcd=_etcd(settings),
        http=settings.http,
        grafana=settings.grafana,
        notify=_notify(settings),
        c10d=settings.c10d,
        c10d_python=str(settings.c10d_python or sys.executable),
        log_level=settings.log_level,
        log_format=settings.log_format,
        **{name: type(PARTS[name])(**parts[name]) for name in PARTS},
    )
    config.check()
    return config


def _field_value(setting: Setting, settings: RdzvdSettings) -> int:
    value = setting.of(settings)
    return round(value * 1000) if setting.unit == "seconds" else int(value)


def _tls_files(settings: RdzvdSettings) -> TlsFiles | None:
    tls = settings.tls
    if tls.cert is None or tls.key is None:
        return None
    return TlsFiles(
        tls.cert,
        tls.key,
        tls.client_ca,
        http_requires=tls.http_client_auth == "require",
        token_listen=tls.token_listen,
    )


def _oidc(settings: RdzvdSettings) -> Oidc | None:
    oidc = settings.oidc
    if oidc.issuer is None:
        return None
    return Oidc(
        oidc.issuer,
        oidc.audience,
        tuple(OidcAccount(a.namespace, a.name or "", a.roles, a.known_as) for a in oidc.account),
        ca=oidc.ca,
        token_file=oidc.token_file,
        leeway_s=oidc.leeway,
        keys_kept_s=oidc.keys_kept,
    )


def _notify(settings: RdzvdSettings) -> Notify | None:
    notify = settings.notify
    if notify.url_file is None:
        return None
    return Notify(notify.url_file, round(notify.queued_after * 1000))


def _etcd(settings: RdzvdSettings) -> EtcdConfig | None:
    etcd = settings.etcd
    if not etcd.endpoints:
        return None
    from rdzv.stores.etcd_config import EtcdConfig, first_line

    return EtcdConfig.parse(
        ",".join(etcd.endpoints),
        prefix=etcd.prefix,
        user=etcd.user or "",
        password=first_line(etcd.password_file) if etcd.password_file else "",
        ca=etcd.ca,
        cert=etcd.cert,
        key=etcd.key,
        ttl_s=etcd.ttl,
    )


class Configuration:
    """The configuration of one rdzvd, from its start through all reloads."""

    def __init__(self, file: Path | None, given: Mapping[str, object]) -> None:
        """Read the file; values `given` on the command line take precedence.

        Raises:
            InvalidRequestError: the configuration has errors, all of which are listed.

        """
        self._file = file or _default_file()
        self._given = given
        self.loaded = load(RdzvdSettings, self._file, given)
        self.config = make_config(self.loaded.settings)

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
            make_config(wanted.settings)
            change = compare(self.loaded, wanted)
        except InvalidRequestError as error:
            log.error("did not reload the configuration; nothing was changed: %s", error)
            return False
        self._file, self.loaded = file, change.loaded
        for line in change.lines:
            log.warning("configuration: %s", line)
        self._apply(change.applied, set_up_logging)
        log.info(
            "reloaded the configuration from %s: %d applied, %d waiting for a restart",
            *(self.source, len(change.applied), len(change.waiting)),
        )
        return True

    def _apply(self, keys: tuple[str, ...], set_up_logging: Callable[[str, str], None]) -> None:
        held: dict[str, Limits | Timings]
        held = {"limits": self.config.limits, "timings": self.config.timings}
        settings = self.loaded.settings
        for setting in map(settings_of(RdzvdSettings).__getitem__, keys):
            for part, name in (field.split(".") for field in setting.sets):
                alter(held[part], name, _field_value(setting, settings))
        if not {"log_level", "log_format"}.isdisjoint(keys):
            set_up_logging(settings.log_level, settings.log_format)


def _default_file() -> Path | None:
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None
