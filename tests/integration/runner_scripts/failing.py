"""The runner, with one of its calls failing on demand: `failing.py RUNNER FD SWITCH`.

RUNNER is the folder of its package.

SWITCH is a mapped file: while it holds NAME:ERRNO, every call of NAME raises that error, in the
runner itself but not in its forks.
"""

import mmap
import os
import selectors
import signal
import socket
import sys
from pathlib import Path

folder, fd, switch_path = sys.argv[1:]
sys.path.insert(0, str(Path(folder).parent))
from runner import runner  # noqa: E402

with Path(switch_path).open("r+b") as file:
    switch = mmap.mmap(file.fileno(), 64)
getpid, me = os.getpid, os.getpid()


def failing(owner, attribute, name):
    call = getattr(owner, attribute)

    def instead(*args, **kwargs):
        wanted, _, code = switch[:].rstrip(b"\0").partition(b":")
        if wanted == name.encode() and getpid() == me:
            raise OSError(int(code), os.strerror(int(code)))
        return call(*args, **kwargs)

    setattr(owner, attribute, instead)


OWNERS = {
    "os": os,
    "signal": signal,
    "socket": socket,
    "socket.socket": socket.socket,
    "Path": Path,
    "epoll": selectors.EpollSelector,
}
for name in Path(__file__).with_name("failing.txt").read_text().split():
    owner, _, attribute = name.rpartition(".")
    failing(OWNERS[owner], attribute, name)
runner.main(int(fd))
