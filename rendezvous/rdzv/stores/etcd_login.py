"""The token that etcd issues to a user, and when it must be replaced."""

from __future__ import annotations

import re

from rdzv.stores.etcd_config import EtcdConfig
from rdzv.stores.etcd_wire import Metadata

# For a watch, some versions report that permission was denied when only the token has expired.
_REFUSAL = re.compile(
    "invalid auth token|revision of auth store is old|refuses the watch: .*permission denied"
)


class Login:
    """The token of one client's user. Does nothing if etcd requires no user.

    The client authenticates if that is `needed`, and sends `metadata` with each call. A call whose
    token is `refused` was not carried out, so the client sends it once more with a new token.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self.token = ""
        """The current token, or empty if there is none."""

    @property
    def needed(self) -> bool:
        """Whether the client must authenticate before its next call."""
        return bool(self._config.user) and not self.token

    @property
    def metadata(self) -> Metadata:
        return (("token", self.token),) if self.token else ()

    def refused(self, sent: Metadata, reason: str) -> bool:
        """Return whether a call failed because of its token, and if so, discard that token.

        A newer token, obtained by another call in the meantime, is kept.
        """
        if not sent or not _REFUSAL.search(reason):
            return False
        if sent == self.metadata:
            self.token = ""
        return True
