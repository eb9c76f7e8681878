"""Attaches to a process: `tracer.py PID`; a traced process can be killed, but not reaped."""

import ctypes
import signal
import sys

PTRACE_SEIZE = 0x4206

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
print(libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0), flush=True)
while True:
    signal.pause()
