"""A worker without torch that is connected with its peers, and fails at once if one is gone.

RANK 0 accepts all others. It reports once it has heard of each, and they once they have its answer.
"""

import json
import os
import selectors
import socket
import sys
import time
from pathlib import Path

FINISH = Path(os.environ["RDZV_TEST_FINISH"])
REPORTS = Path(os.environ["RDZV_TEST_REPORTS"])
RANK, ROUND = os.environ["RANK"], os.environ["RDZV_ROUND"]
ADDRESS = f"\0{os.environ['RDZV_TEST_MARK']}-{ROUND}"
"""No other round of this test, and no other test, has it."""


def join() -> list[socket.socket]:
    """Return the connections with the peers; RANK 0 has all."""
    if RANK == "0":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(ADDRESS)
        listening.listen()
        peers = [listening.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
        for peer in peers:
            peer.send(b"1")
        return peers
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(ADDRESS)
        except ConnectionRefusedError:
            time.sleep(0.01)
            continue
        if peer.recv(1) != b"1":
            sys.exit("RANK 0 is gone")
        return [peer]


peers = join()
temporary = REPORTS / f"{os.getpid()}.tmp"
temporary.write_text(json.dumps({**os.environ, "pid": os.getpid()}))
temporary.rename(REPORTS / f"{ROUND}-{RANK}-{os.getpid()}.json")
with selectors.DefaultSelector() as selector:
    for one in peers:
        selector.register(one, selectors.EVENT_READ)
    while not FINISH.exists():
        if selector.select(0.02) and not FINISH.exists():
            sys.exit("a peer is gone")
