"""A file server that can hang: a small FUSE file system in memory, served by a process of its own.

`SIGSTOP` makes it a server that does not answer: every call on a path below the mount waits then,
in the kernel, until the server goes on or is killed. Nothing is cached, so each call asks it. Its
clock may differ from this machine's, as that of an NFS server may.

Takes root, and /dev/fuse. The protocol is that of include/uapi/linux/fuse.h.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

WHY_NOT = (
    ""
    if os.geteuid() == 0 and Path("/dev/fuse").exists()
    else "a file server that hangs takes root and /dev/fuse"
)
"""Why there is none on this machine; empty: there is."""

START_TIMEOUT_S = 10.0

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_SETATTR = struct.Struct("<II6Q8I")
_MAX_WRITE = 1 << 17
_ROOT = 1
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


class FileServer:
    """A mount, and the process that serves it."""

    def __init__(self, mount: Path, process: subprocess.Popen[bytes]) -> None:
        """Use `serving`."""
        self.mount = mount
        self.pid = process.pid

    def hang(self) -> None:
        """Answer nothing any more; returns when that is so."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Answer all that was asked meanwhile, and what is asked from now on."""
        os.kill(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def serving(mount: Path, clock_ahead_s: float = 0.0) -> Iterator[FileServer]:
    """Serve an empty file system at a folder, which is made; its clock is that much ahead."""
    mount.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(mount), str(clock_ahead_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        # It says so once it is mounted, or ends.
        assert process.stdout.readline() == b"serves\n", "the file system could not be mounted"
        yield FileServer(mount, process)
    finally:
        # Whoever still waits for an answer gets an error.
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        _libc.umount2(os.fsencode(mount), _MNT_DETACH)


# ---------------------------------------------------------------------- the server


@dataclass(eq=False)
class _Node:
    number: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    content: bytearray = field(default_factory=bytearray)
    children: dict[bytes, _Node] = field(default_factory=dict)

    def attributes(self) -> bytes:
        size = len(self.content)
        seconds, nanoseconds = divmod(self.mtime_ns, 10**9)
        times = (seconds,) * 3, (nanoseconds,) * 3
        owner = (self.mode, 1, self.uid, self.gid)
        return _ATTR.pack(
            self.number, size, (size + 511) // 512, *times[0], *times[1], *owner, 0, 4096, 0
        )

    def entry(self) -> bytes:
        return _ENTRY.pack(self.number, 0, 0, 0, 0, 0) + self.attributes()


class _FileSystem:
    """Files and folders in memory; one request at a time."""

    def __init__(self, clock_ahead_s: float) -> None:
        self._ahead_ns = round(clock_ahead_s * 10**9)
        self._nodes: dict[int, _Node] = {}
        self._who = (0, 0)
        self._new(stat.S_IFDIR | 0o777)

    def answer(self, request: bytes) -> bytes | None:
        """Answer a request; None for one that gets no answer."""
        _, opcode, unique, number, uid, gid, _, _ = _IN.unpack_from(request)
        if opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET
            return None
        self._who = uid, gid
        try:
            do = _OPERATIONS.get(opcode)
            if do is None:
                raise OSError(errno.ENOSYS, "")
            said, error = (
                do(self, self._nodes.get(number, self._nodes[_ROOT]), request[_IN.size :]),
                0,
            )
        except OSError as failure:
            said, error = b"", -(failure.errno or errno.EIO)
        return _OUT.pack(_OUT.size + len(said), error, unique) + said

    # ------------------------------------------------------------------ what is asked

    def init(self, _: _Node, body: bytes) -> bytes:
        major, _, readahead = struct.unpack_from("<III", body)
        # Writes of more than a page, and creating and opening in one.
        return struct.pack("<IIIIHHIIHHI7I", major, 31, readahead, 1 << 5, 16, 12, _MAX_WRITE,
                           1, 0, 0, 0, *[0] * 7)  # fmt: skip

    def lookup(self, node: _Node, body: bytes) -> bytes:
        return self._child(node, _names(body)[0]).entry()

    def getattr(self, node: _Node, _: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + node.attributes()

    def setattr(self, node: _Node, body: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, mtime_ns, _, mode, _, uid, gid, _ = (
            _SETATTR.unpack_from(body)
        )
        if valid & 1:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
        if valid & 2:
            node.uid = uid
        if valid & 4:
            node.gid = gid
        if valid & 8:
            node.content = node.content[:size].ljust(size, b"\0")
            self._touch(node)
        if valid & 256:
            self._touch(node)
        elif valid & 32:
            node.mtime_ns = mtime * 10**9 + mtime_ns
        return self.getattr(node, b"")

    def mkdir(self, node: _Node, body: bytes) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        made = self._new(stat.S_IFDIR | (mode & ~umask))
        return self._link(node, _names(body[8:])[0], made).entry()

    def symlink(self, node: _Node, body: bytes) -> bytes:
        name, target = _names(body)
        made = self._new(stat.S_IFLNK | 0o777)
        made.content = bytearray(target)
        return self._link(node, name, made).entry()

    def create(self, node: _Node, body: bytes) -> bytes:
        _, mode, umask, _ = struct.unpack_from("<IIII", body)
        made = self._new(stat.S_IFREG | (mode & ~umask & 0o7777))
        return self._link(node, _names(body[16:])[0], made).entry() + self.open(made, b"")

    def unlink(self, node: _Node, body: bytes) -> bytes:
        [name] = _names(body)
        if self._child(node, name).children:
            raise OSError(errno.ENOTEMPTY, "")
        del node.children[name]
        return b""

    def rename(self, node: _Node, body: bytes) -> bytes:
        return self._rename(node, struct.unpack_from("<Q", body)[0], body[8:])

    def rename2(self, node: _Node, body: bytes) -> bytes:
        return self._rename(node, struct.unpack_from("<Q", body)[0], body[16:])

    def _rename(self, node: _Node, to: int, names: bytes) -> bytes:
        before, after = _names(names)
        self._nodes[to].children[after] = self._child(node, before)
        del node.children[before]
        return b""

    def open(self, _: _Node, __: bytes) -> bytes:
        return struct.pack("<QII", 0, 1, 0)  # FOPEN_DIRECT_IO: nothing is cached.

    def opendir(self, _: _Node, __: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def read(self, node: _Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(node.content[offset : offset + size])

    def write(self, node: _Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        data = body[40 : 40 + size]
        node.content.extend(bytes(max(offset - len(node.content), 0)))
        node.content[offset : offset + size] = data
        self._touch(node)
        return struct.pack("<II", size, 0)

    def readdir(self, node: _Node, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        said = b""
        for place, (name, child) in enumerate(node.children.items(), start=1):
            entry = struct.pack("<QQII", child.number, place, len(name), child.mode >> 12) + name
            entry += bytes(-len(entry) % 8)
            if place > offset and len(said) + len(entry) <= size:
                said += entry
        return said

    def readlink(self, node: _Node, _: bytes) -> bytes:
        return bytes(node.content)

    def statfs(self, _: _Node, __: bytes) -> bytes:
        return struct.pack("<5Q4I6I", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255,
                           4096, 0, *[0] * 6)  # fmt: skip

    def nothing(self, _: _Node, __: bytes) -> bytes:
        return b""

    # ------------------------------------------------------------------ nodes

    def _new(self, mode: int) -> _Node:
        number = len(self._nodes) + _ROOT
        node = self._nodes[number] = _Node(number, mode, *self._who, 0)
        self._touch(node)
        return node

    def _touch(self, node: _Node) -> None:
        node.mtime_ns = time.time_ns() + self._ahead_ns

    def _child(self, node: _Node, name: bytes) -> _Node:
        try:
            return node.children[name]
        except KeyError:
            raise OSError(errno.ENOENT, "") from None

    def _link(self, node: _Node, name: bytes, made: _Node) -> _Node:
        if name in node.children:
            raise OSError(errno.EEXIST, "")
        node.children[name] = made
        self._touch(node)
        return made


_OPERATIONS: dict[int, Callable[[_FileSystem, _Node, bytes], bytes]] = {
    1: _FileSystem.lookup,
    3: _FileSystem.getattr,
    4: _FileSystem.setattr,
    5: _FileSystem.readlink,
    6: _FileSystem.symlink,
    9: _FileSystem.mkdir,
    10: _FileSystem.unlink,
    11: _FileSystem.unlink,
    12: _FileSystem.rename,
    14: _FileSystem.open,
    15: _FileSystem.read,
    16: _FileSystem.write,
    17: _FileSystem.statfs,
    18: _FileSystem.nothing,  # RELEASE
    20: _FileSystem.nothing,  # FSYNC
    # Not FLUSH (25): a process that is killed would not end before that was answered.
    26: _FileSystem.init,
    27: _FileSystem.opendir,
    28: _FileSystem.readdir,
    29: _FileSystem.nothing,  # RELEASEDIR
    35: _FileSystem.create,
    45: _FileSystem.rename2,
}


def _names(data: bytes) -> list[bytes]:
    return data.rstrip(b"\0").split(b"\0")


def _serve(mount: str, clock_ahead_s: float) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    where = os.fsencode(mount)
    if _libc.mount(b"rdzv-test", where, b"fuse.rdzv-test", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    sys.stdout.write("serves\n")
    sys.stdout.flush()
    files = _FileSystem(clock_ahead_s)
    while True:
        try:
            request = os.read(fd, _MAX_WRITE + 4096)
        except OSError as error:
            if error.errno == errno.ENOENT:  # Who asked has been interrupted.
                continue
            raise
        if (answer := files.answer(request)) is not None:
            with contextlib.suppress(FileNotFoundError):
                os.write(fd, answer)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]))
