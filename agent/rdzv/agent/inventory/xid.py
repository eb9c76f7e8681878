"""Broken GPUs as reported by NVIDIA's driver, through Xid errors in the kernel's log.

The log is /dev/kmsg. Each read returns one record, `PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT`.
Numbers restart at each boot. The kernel drops the oldest records, so an error may be gone before an
operator has looked at the node; in that case other checks must detect its effects.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from rdzv.structs import struct

KMSG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

CODES = ("48", "62", "64", "74", "79", "95", "110", "119", "120", "140", "143")
"""After these a GPU must be reset or replaced. Programs cause others (31, 13); the driver handles
some."""

RECORD_BYTES = 8_192
"""The size of the largest record that the kernel writes."""
LARGEST_FILE_BYTES = 16 << 20
"""How much of the end of a file is read. No kernel keeps more."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): ([0-9]+)(?:, ?(.*))?$")


@struct(frozen=True)
class Xid:
    """An Xid error."""

    number: int
    place: str
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code} on {self.place}" + (f": {self.text}" if self.text else "")


def parse(records: Iterable[str]) -> Iterator[Xid]:
    """Find the errors among records, skipping text that is not a record.

    >>> [str(xid) for xid in parse(["4,812,99,-;NVRM: Xid (PCI:0000:3b:00): 79, fell off the bus"])]
    ['79 on 0000:3b:00: fell off the bus']
    """
    for record in records:
        head, _, text = record.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not fields[1].isdecimal():
            continue
        if (found := _XID.search(text.rstrip())) is not None:
            yield Xid(int(fields[1]), found[1], found[2], (found[3] or "").strip())


def read_records(path: Path) -> list[str]:
    """Return all records from the kernel's log, or from a file in the same format."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            size = os.fstat(fd).st_size
            data = os.pread(fd, LARGEST_FILE_BYTES, max(size - LARGEST_FILE_BYTES, 0))
            return data.decode(errors="replace").splitlines()
        return list(_read_device(fd))
    finally:
        os.close(fd)


def _read_device(fd: int) -> Iterator[str]:
    while True:
        try:
            data = os.read(fd, RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:
            # Records were overwritten before they were read; the next read continues after them.
            continue
        if not data:
            return
        # The lines after the first are the kernel's description of the device.
        yield data.decode(errors="replace").partition("\n")[0]


class Lifted:
    """The last record that an operator has dismissed, remembered until the next boot."""

    def __init__(self, file: Path, boot_id: Path = BOOT_ID) -> None:
        self._file = file
        self._boot_id = boot_id

    def number(self) -> int:
        """Return the number of the last dismissed record, or -1 if all records count."""
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            return int(kept["number"]) if kept["boot"] == self._boot() else -1
        except (OSError, ValueError, KeyError, TypeError):
            return -1

    def lift(self, records: Iterable[str]) -> None:
        """Dismiss these records, so that only later ones count from now on."""
        number = max((xid.number for xid in parse(records)), default=-1)
        if number > self.number():
            kept = json.dumps({"boot": self._boot(), "number": number})
            temporary = self._file.with_suffix(".new")
            temporary.write_text(kept, encoding="utf-8")
            temporary.replace(self._file)

    def _boot(self) -> str:
        try:
            return self._boot_id.read_text(encoding="utf-8").strip()
        except OSError:
            return ""


def describe(found: Iterable[Xid], codes: Collection[str], after: int) -> str:
    """Describe the latest error of each GPU and code after this record; "" if there is none."""
    last = {(xid.place, xid.code): xid for xid in found if xid.code in codes and xid.number > after}
    return "; ".join(map(str, last.values()))
