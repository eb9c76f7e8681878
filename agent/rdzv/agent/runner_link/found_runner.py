"""A runner left by another agent, found at its socket: adopt it, leave it alone, or end it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rdzv.agent.runner.channel import Channel, MalformedFrameError
from rdzv.agent.runner.descriptors import peer_of, short_path
from rdzv.agent.runner.requests import PROTOCOL_VERSION
from rdzv.agent.runner_link.runner_events import OnEvent
from rdzv.agent.runner_link.runner_link import RunnerHello, RunnerLink

MEET_TIMEOUT_S = 3.0
"""How long a runner may take to send its hello. A stopped or hung runner never sends one."""
_BUSY_RETRY_S = 0.05


class NotAdoptableError(Exception):
    """Raised if a runner cannot be adopted; the message says why. The runner will end by itself."""


class SilentRunnerError(NotAdoptableError):
    """Raised if a runner does not respond. One that hangs will not end by itself either."""

    def __init__(self, pid: int, timeout_s: float) -> None:
        super().__init__(f"pid {pid} does not answer within {timeout_s:g} s")
        self.pid = pid


class FoundRunner:
    """A runner that has lost its agent. It is not adopted yet; call `adopt` or `leave`."""

    def __init__(self, path: Path, channel: Channel, hello: RunnerHello) -> None:
        """Take a channel and the hello received on it. Use `meet` instead."""
        self.path = path
        self.hello = hello
        self._channel = channel

    @classmethod
    async def meet(cls, path: Path, timeout_s: float = MEET_TIMEOUT_S) -> FoundRunner | None:
        """Connect to the runner listening at a path. Returns None if there is none.

        Raises:
            SilentRunnerError: it does not respond.
            NotAdoptableError: it has another agent, or is of another version.
        """
        refused, pid = f"it cannot be reached within {timeout_s:g} s", 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if (met := await _connect(path)) is None:
                        return None
                    channel, pid = met
                    try:
                        if (message := await _first_message(channel)) is not None:
                            if message.get("type") != "refused":
                                return cls(path, channel, read_hello(message))
                            # Its agent may have died a moment ago.
                            refused, pid = str(message.get("reason")), 0
                    except BaseException:
                        channel.close()
                        raise
                    channel.close()
                    await asyncio.sleep(_BUSY_RETRY_S)
        except TimeoutError:
            if pid:
                raise SilentRunnerError(pid, timeout_s) from None
            raise NotAdoptableError(refused) from None
        except OSError as error:
            raise NotAdoptableError(str(error)) from error

    def adopt(self) -> None:
        """Take charge of the runner. Its events wait for a `RunnerLink` to receive them."""
        with suppress(OSError):  # It has ended, which the link will notice.
            self._channel.send({"type": "adopt"})

    def link(self, on_event: OnEvent) -> RunnerLink:
        return RunnerLink(None, self._channel, on_event, self.hello)

    def leave(self) -> None:
        """Disconnect. The runner keeps waiting for an agent until its orphan timeout."""
        self._channel.close()

    def end(self) -> None:
        for request in ("adopt", "shutdown"):
            try:
                self._channel.send({"type": request})
            except OSError:
                break
        self._channel.close()


async def _connect(path: Path) -> tuple[Channel, int] | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        try:
            with short_path(path) as short:
                await asyncio.get_running_loop().sock_connect(connection, short)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        pid, uid = peer_of(connection)
        if uid not in (0, os.geteuid()):
            raise NotAdoptableError(f"another user's process listens at {path}")
    except BaseException:
        connection.close()
        raise
    return Channel(connection), pid


async def _first_message(channel: Channel) -> Mapping[str, object] | None:
    loop, fd = asyncio.get_running_loop(), channel.fileno()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        while True:
            try:
                if (message := channel.next_message()) is not None:
                    return message
                await readable.wait()
                readable.clear()
                channel.receive()
            except EOFError:
                return channel.next_message()
            except MalformedFrameError as error:
                raise NotAdoptableError(str(error)) from error
    finally:
        loop.remove_reader(fd)


def read_hello(message: Mapping[str, Any]) -> RunnerHello:
    if (version := message.get("version")) != PROTOCOL_VERSION:
        raise NotAdoptableError(
            f"pid {message.get('pid')!r:.20} speaks version {version!r:.20} of the runner's "
            f"protocol, and this agent speaks {PROTOCOL_VERSION}"
        )
    try:
        return msgspec.convert(message, RunnerHello, str_keys=True)
    except (ValueError, msgspec.ValidationError) as error:
        raise NotAdoptableError(f"it sent {message!r:.200}: {error}") from error
