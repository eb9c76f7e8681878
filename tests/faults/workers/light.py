"""A worker without torch: steps in lockstep with its peers through RANK 0, as an all-reduce does.

RANK 0 serves at MASTER_ADDR:MASTER_PORT. In each step every worker sends its number and waits for
the answer, which comes when all have sent theirs. RANK 0 saves each step.

A silent peer makes all others wait. A peer whose connection ends makes some fail, as gloo's
collectives do, and others hang until they are stopped, as NCCL's do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from diary import Diary, load_step, save_step

PAUSE_S = 0.05
MEET_S = 120.0
NUMBER = struct.Struct("!q")
END = -1

FINISH = Path(os.environ["RDZV_FAULTS_FINISH"])
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
ROUND = int(os.environ["RDZV_ROUND"])
MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


class PeerGoneError(Exception):
    """A peer's connection has ended."""


def receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            raise PeerGoneError("a peer has closed its connection")
        data += more
    return data


def gather(diary: Diary) -> list[socket.socket]:
    """As RANK 0, wait until all other workers of this round are connected."""
    server = socket.create_server(("", MASTER[1]), reuse_port=False)
    server.settimeout(MEET_S)
    peers: dict[int, socket.socket] = {}
    with server:
        while len(peers) < WORLD_SIZE - 1:
            peer, address = server.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = json.loads(receive(peer, NUMBER.unpack(receive(peer, 8))[0]))
            if (hello["round"], hello["world_size"]) != (ROUND, WORLD_SIZE):
                diary.met_stranger(f"{hello} from {address}")
                peer.close()
            elif hello["rank"] in peers:
                diary.met_stranger(f"a second rank {hello['rank']}, from {address}")
                peer.close()
            else:
                peers[hello["rank"]] = peer
    return list(peers.values())


def connect() -> socket.socket:
    """Connect to RANK 0, which may take a while to start."""
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            peer = socket.create_connection(MASTER, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = json.dumps({"round": ROUND, "rank": RANK, "world_size": WORLD_SIZE}).encode()
    peer.sendall(NUMBER.pack(len(hello)) + hello)
    return peer


def lead(diary: Diary) -> None:
    peers = gather(diary)
    step = load_step()
    while True:
        for peer in peers:
            peer.sendall(NUMBER.pack(step))
        if step == END:
            return
        for peer in peers:
            if (said := NUMBER.unpack(receive(peer, 8))[0]) != step:
                raise RuntimeError(f"a peer is at step {said}, not {step}")
        save_step(step)
        diary.step = step
        time.sleep(PAUSE_S)
        step = END if FINISH.exists() else step + 1


def follow(diary: Diary) -> None:
    peer = connect()
    while (step := NUMBER.unpack(receive(peer, 8))[0]) != END:
        peer.sendall(NUMBER.pack(step))
        diary.step = step


def main() -> None:
    diary = Diary()
    try:
        lead(diary) if RANK == 0 else follow(diary)
    except (OSError, PeerGoneError) as error:
        if os.getpid() % 2:
            while True:
                signal.pause()
        diary.end(f"failed: {error}")
        sys.exit(1)
    diary.end("succeeded")


main()
