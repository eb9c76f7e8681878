"""Run pip, and say in a few lines what takes its time.

    pip_progress.py PIP ARGUMENT...

It writes the same with a terminal and without one. If pip fails, what it said last follows, and
the exit code is pip's.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections import deque

LARGE_MB = 10.0
"""Downloads from this size on are named."""
SILENCE_S = 20.0
"""After this time, then twice as long each time, the last line is said to go on."""
LAST_LINES = 20

_DOWNLOAD = re.compile(r"\s*Downloading (?:\S*/)?([^-\s]+)-([^-\s]+)\S* \((\S+) ([kMG]B)\)")
_INSTALL = re.compile(r"Installing collected packages: (.*)")


def main(command: list[str]) -> int:
    """Run the command; return its exit code."""
    began_s = time.monotonic()

    def say(what: str) -> None:
        minutes, seconds = divmod(round(time.monotonic() - began_s), 60)
        print(f"  {minutes}:{seconds:02}  {what}", flush=True)  # noqa: T201

    doing = "looking for packages"
    say(doing)
    last = deque[str](maxlen=LAST_LINES)
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert pip.stdout is not None
    rest, silence_s = "", SILENCE_S
    while True:
        if not select.select([pip.stdout], [], [], silence_s)[0]:
            say(f"still {doing}")
            silence_s *= 2
            continue
        read = os.read(pip.stdout.fileno(), 65536).decode(errors="replace")
        if not read:
            break
        *lines, rest = (rest + read).split("\n")
        last.extend(lines)
        for line in lines:
            if said := shown(line):
                doing, silence_s = said, SILENCE_S
                say(said)
    if code := pip.wait():
        print("\n".join([*last, rest]), file=sys.stderr)  # noqa: T201
        return code
    say("done")
    return 0


def shown(line: str) -> str:
    """Return what is said of a line of pip's; nothing of most.

    >>> shown("  Downloading torch-2.13.0-cp311-none-linux_x86_64.whl (192.3 MB)")
    'downloading torch 2.13.0 (192.3 MB)'
    >>> shown("  Downloading click-8.5.1-py3-none-any.whl (126 kB)")
    ''
    >>> shown("Installing collected packages: click, torch")
    'installing 2 packages'
    """
    if found := _DOWNLOAD.match(line):
        name, version, size, unit = found.groups()
        if unit == "GB" or (unit == "MB" and float(size) >= LARGE_MB):
            return f"downloading {name} {version} ({size} {unit})"
    if found := _INSTALL.match(line):
        return f"installing {len(found[1].split(', '))} packages"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
