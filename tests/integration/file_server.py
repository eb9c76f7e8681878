"""A file server that can hang: a FUSE file system in memory, served by its own process.

`SIGSTOP` makes it a server that does not answer: each call on a path below the mount then waits in
the kernel until the server continues or is killed. A process that looks up the file `NEVER` waits
for an answer to a request that was accepted, and survives SIGKILL until the server is killed.
Nothing is cached, so each call asks the server. Its clock may differ from this machine's, as the
clock of an NFS server may.

Needs root and /dev/fuse. The protocol is that of include/uapi/linux/fuse.h; the server supports
what scripts, logs and error files need. All files belong to root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
NEVER = "never"


class FileServer:
    """Serves the files below `path`, until it hangs."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        """Use `serving`."""
        self.path = path
        self._process = process

    def hang(self) -> None:
        """Stop answering; returns once that is the case."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Answer the calls that wait, and all later ones."""
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def serving(path: Path, clock_ahead_s: float = 0.0) -> Iterator[FileServer]:
    """Create a folder and serve an empty file system there, its clock this much ahead."""
    import pytest  # The server's process does not need it.

    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a file server that hangs needs root and /dev/fuse")
    path.mkdir()
    command = [sys.executable, "-I", __file__, str(path), str(clock_ahead_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"mounted\n":
                pytest.skip("no file system can be mounted here")
            yield FileServer(path, process)
        finally:
            process.kill()  # The kernel then refuses the calls that still wait.
            _libc.umount2(os.fsencode(path), _MNT_DETACH)


# ---------------------------------------------------------------------- the server's process


class _Op(IntEnum):
    LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK = range(1, 7)
    MKDIR, UNLINK, RMDIR, RENAME = range(9, 13)
    OPEN, READ, WRITE = range(14, 17)
    INIT, OPENDIR, READDIR = range(26, 29)
    CREATE, INTERRUPT = range(35, 37)
    BATCH_FORGET = 42
    RENAME2 = 45


class _Sets(IntFlag):
    MODE, SIZE, MTIME, MTIME_NOW = 1 << 0, 1 << 3, 1 << 5, 1 << 8


_HEADER = struct.Struct("<IIQQ16x")
_RANGE = struct.Struct("<8xQI20x")  # The offset and size of READ, WRITE and READDIR.
_OPENED = struct.pack("<QI4x", 0, 1)  # FOPEN_DIRECT_IO: the kernel keeps no content.
_MAX_WRITE = 1 << 17


@dataclass(eq=False)
class _Node:
    number: int
    mode: int
    mtime_ns: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[bytes, _Node] = field(default_factory=dict)

    def find(self, name: bytes) -> _Node:
        if name not in self.names:
            raise OSError(errno.ENOENT, "no such file")
        return self.names[name]

    def attributes(self) -> bytes:
        size, (seconds, ns) = len(self.data), divmod(self.mtime_ns, 10**9)
        times = (seconds, seconds, seconds, ns, ns, ns)
        return struct.pack(
            *("<QQQQQQIIIIIIIIII", self.number, size, (size + 511) // 512, *times),
            *(self.mode, 1, 0, 0, 0, 4096, 0),
        )

    def entry(self) -> bytes:
        return struct.pack("<Q32x", self.number) + self.attributes()

    def listing(self, offset: int, size: int) -> bytes:
        said = b""
        for place, (name, node) in enumerate(list(self.names.items())[offset:], offset + 1):
            entry = struct.pack("<QQII", node.number, place, len(name), node.mode >> 12) + name
            entry += bytes(-len(entry) % 8)
            if len(said) + len(entry) > size:
                break
            said += entry
        return said


class _Files:
    """The files, by number."""

    def __init__(self, clock_ahead_s: float) -> None:
        self._ahead_ns = round(clock_ahead_s * 10**9)
        self._nodes: dict[int, _Node] = {}
        self._new(stat.S_IFDIR | 0o755)

    def answer(self, op: int, number: int, body: bytes) -> bytes:
        """Return the answer to a request.

        A refusal is an `OSError`. The kernel copes with missing operations. FLUSH is missing on
        purpose: otherwise a killed process would not end before the server had answered.
        """
        if op == _Op.INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 16, 12, _MAX_WRITE, 1, 0, 0, 0)
        node = self._nodes[number]
        match op:
            case _Op.LOOKUP:
                return node.find(*_names(body)).entry()
            case _Op.GETATTR:
                return bytes(16) + node.attributes()
            case _Op.SETATTR:
                self._set(node, body)
                return bytes(16) + node.attributes()
            case _Op.MKDIR:
                (mode,) = struct.unpack_from("<I", body)
                (name,) = _names(body[8:])
                node.names[name] = made = self._new(stat.S_IFDIR | mode)
                return made.entry()
            case _Op.CREATE:
                (mode,) = struct.unpack_from("<4xI", body)
                (name,) = _names(body[16:])
                node.names[name] = made = self._new(stat.S_IFREG | mode)
                return made.entry() + _OPENED
            case _Op.SYMLINK:
                name, target = _names(body)
                node.names[name] = made = self._new(stat.S_IFLNK | 0o777)
                made.data += target
                return made.entry()
            case _Op.READLINK:
                return bytes(node.data)
            case _Op.UNLINK | _Op.RMDIR:
                (name,) = _names(body)
                if node.find(name).names:
                    raise OSError(errno.ENOTEMPTY, "not empty")
                del node.names[name]
                return b""
            case _Op.RENAME | _Op.RENAME2:
                (folder,) = struct.unpack_from("<Q", body)
                name, new_name = _names(body[8 if op == _Op.RENAME else 16 :])
                self._nodes[folder].names[new_name] = node.find(name)
                del node.names[name]
                return b""
            case _Op.OPEN | _Op.OPENDIR:
                return _OPENED
            case _Op.READ:
                offset, size = _RANGE.unpack_from(body)
                return bytes(node.data[offset : offset + size])
            case _Op.WRITE:
                offset, size = _RANGE.unpack_from(body)
                node.data += bytes(max(offset - len(node.data), 0))
                node.data[offset : offset + size] = body[_RANGE.size :]
                node.mtime_ns = self._now_ns()
                return struct.pack("<I4x", size)
            case _Op.READDIR:
                return node.listing(*_RANGE.unpack_from(body))
        raise OSError(errno.ENOSYS, "not served")

    def _set(self, node: _Node, body: bytes) -> None:
        sets, size, seconds, ns, mode = struct.unpack_from("<I12xQ16xQ12xI4xI", body)
        if sets & _Sets.MODE:
            node.mode = mode
        if sets & _Sets.SIZE:
            node.data = node.data[:size].ljust(size, b"\0")
        if sets & (_Sets.SIZE | _Sets.MTIME_NOW):
            node.mtime_ns = self._now_ns()
        elif sets & _Sets.MTIME:
            node.mtime_ns = seconds * 10**9 + ns

    def _new(self, mode: int) -> _Node:
        number = len(self._nodes) + 1  # The first is the root.
        node = self._nodes[number] = _Node(number, mode, self._now_ns())
        return node

    def _now_ns(self) -> int:
        return time.time_ns() + self._ahead_ns


def _names(data: bytes) -> list[bytes]:
    return data.split(b"\0")[:-1]


def _mount(path: str) -> int:
    """Mount at a folder; return the descriptor on which the kernel sends its requests."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if _libc.mount(b"rdzv-test", os.fsencode(path), b"fuse", ctypes.c_ulong(0), options) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return fd


def _serve(fd: int, files: _Files) -> None:
    while True:
        # A request is gone once its sender is interrupted.
        with contextlib.suppress(FileNotFoundError):
            request = os.read(fd, _MAX_WRITE + 4096)
            _, op, unique, number = _HEADER.unpack_from(request)
            if op in (_Op.FORGET, _Op.INTERRUPT, _Op.BATCH_FORGET):
                continue  # They have no answer.
            if op == _Op.LOOKUP and _names(request[_HEADER.size :]) == [NEVER.encode()]:
                continue
            code, said = 0, b""
            try:
                said = files.answer(op, number, request[_HEADER.size :])
            except OSError as error:
                code = error.errno
            os.write(fd, struct.pack("<IiQ", 16 + len(said), -code, unique) + said)


if __name__ == "__main__":
    fd = _mount(sys.argv[1])
    print("mounted", flush=True)
    _serve(fd, _Files(float(sys.argv[2])))
