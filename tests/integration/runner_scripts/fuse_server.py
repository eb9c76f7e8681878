"""A file system in memory, served to the kernel over /dev/fuse: `fuse_server.py MOUNTPOINT`.

Stopped by SIGSTOP, it is a file server that hangs: whoever asks it for anything waits. Says "ready"
once it is mounted and answers. Needs root. It speaks the protocol of the kernel itself, and no more
of it than log files and scripts need.
"""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys

FORGET, BATCH_FORGET = 2, 42
(LOOKUP, GETATTR, SETATTR, READLINK, SYMLINK) = (1, 3, 4, 5, 6)
(MKDIR, UNLINK, RMDIR, RENAME, RENAME2) = (9, 10, 11, 12, 45)
(OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH) = (14, 15, 16, 18, 20, 25)
(INIT, OPENDIR, READDIR, RELEASEDIR, CREATE) = (26, 27, 28, 29, 35)
SETS_MODE, SETS_SIZE = 1, 8
ROOT = 1


class Files:
    """The files, by number; a folder's `names` lead to others."""

    def __init__(self):
        self.nodes = {ROOT: {"mode": stat.S_IFDIR | 0o777, "names": {}}}

    def answer(self, opcode, number, body):
        """Return the answer to a request; `OSError` if it is refused."""
        node = self.nodes[number]
        if opcode == LOOKUP:
            return self._entry(self._find(node, body))
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self._attributes(number)
        if opcode == SETATTR:
            valid, _, _, size = struct.unpack_from("<IIQQ", body)
            if valid & SETS_SIZE:
                del node["data"][size:]
                node["data"] += bytes(size - len(node["data"]))
            if valid & SETS_MODE:
                (mode,) = struct.unpack_from("<I", body, 68)
                node["mode"] = mode
            return struct.pack("<QII", 0, 0, 0) + self._attributes(number)
        if opcode in (MKDIR, CREATE):
            return self._make(node, opcode, body)
        if opcode == SYMLINK:
            name, target, _ = body.split(b"\0")
            return self._entry(self._add(node, name, stat.S_IFLNK | 0o777, data=bytearray(target)))
        if opcode == READLINK:
            return bytes(node["data"])
        if opcode in (RENAME, RENAME2):
            (folder,) = struct.unpack_from("<Q", body)
            name, new_name, _ = body[8 if opcode == RENAME else 16 :].split(b"\0")
            self.nodes[folder]["names"][new_name] = node["names"].pop(name)
            return b""
        if opcode in (UNLINK, RMDIR):
            self._find(node, body)
            del node["names"][body.rstrip(b"\0")]
            return b""
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", number, 0, 0)
        if opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return bytes(node["data"][offset : offset + size])
        if opcode == WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            node["data"] += bytes(max(offset - len(node["data"]), 0))
            node["data"][offset : offset + size] = body[40 : 40 + size]
            return struct.pack("<II", size, 0)
        if opcode == READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self._list(node, offset, size)
        if opcode in (RELEASE, RELEASEDIR, FLUSH, FSYNC):
            return b""
        raise OSError(errno.ENOSYS, "not served")

    def _find(self, node, name):
        try:
            return node["names"][name.rstrip(b"\0")]
        except KeyError:
            raise OSError(errno.ENOENT, "no such file") from None

    def _make(self, node, opcode, body):
        is_folder = opcode == MKDIR
        (mode,) = struct.unpack_from("<I", body, 0 if is_folder else 4)
        name = body[8 if is_folder else 16 :].rstrip(b"\0")
        mode &= 0o7777
        if is_folder:
            return self._entry(self._add(node, name, stat.S_IFDIR | mode, names={}))
        number = self._add(node, name, stat.S_IFREG | mode, data=bytearray())
        return self._entry(number) + struct.pack("<QII", number, 0, 0)

    def _add(self, folder, name, mode, **content):
        number = max(self.nodes) + 1
        self.nodes[number], folder["names"][name] = {"mode": mode, **content}, number
        return number

    def _list(self, node, offset, size):
        said = b""
        for place, (name, number) in enumerate(list(node["names"].items())[offset:], offset + 1):
            kind = self.nodes[number]["mode"] >> 12
            entry = struct.pack("<QQII", number, place, len(name), kind) + name
            entry += bytes(-len(entry) % 8)
            if len(said) + len(entry) > size:
                break
            said += entry
        return said

    def _entry(self, number):
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self._attributes(number)

    def _attributes(self, number):
        node = self.nodes[number]
        size = len(node.get("data", b""))
        times = (0,) * 6
        return struct.pack(
            *("<QQQQQQIIIIIIIIII", number, size, (size + 511) // 512, *times),
            *(node["mode"], 1, 0, 0, 0, 4096, 0),
        )


def mount(where):
    """Mount at a folder; return the descriptor that the kernel asks through."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40777,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"rdzv-test", os.fsencode(where), b"fuse", ctypes.c_ulong(0), options) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), where)
    return fd


def serve(fd, files):
    """Answer the kernel until the file system is unmounted."""
    with contextlib.suppress(OSError):
        while True:
            request = os.read(fd, 1 << 18)
            _, opcode, unique, number = struct.unpack_from("<IIQQ", request)
            if opcode in (FORGET, BATCH_FORGET):
                continue
            code, said = 0, b""
            if opcode == INIT:
                said = struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 8, 6, 1 << 16, 1, 0, 0, 0)
                print("ready", flush=True)
            else:
                try:
                    said = files.answer(opcode, number, request[40:])
                except OSError as error:
                    code = error.errno
            os.write(fd, struct.pack("<IiQ", 16 + len(said), -code, unique) + said)


if __name__ == "__main__":
    serve(mount(sys.argv[1]), Files())
