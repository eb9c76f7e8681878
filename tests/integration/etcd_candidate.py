"""One candidate in its own process: it campaigns, leads, and writes on request.

It prints one JSON object per line; on `write` on stdin it says whether it can prove that it leads,
and then writes whatever the answer was, so that only the fence can stop it.
"""

from __future__ import annotations

import asyncio
import json
import sys

from rdzv.core.model import Membership, Settings
from rdzv.errors import RendezvousError
from rdzv.stores.election import Election
from rdzv.stores.etcd import EtcdStore
from rdzv.stores.etcd_client import EtcdClient
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.structs import replace

MEMBERSHIP = Membership("job", "run", 1, Settings(1, 1), 0)


def say(event: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


async def lead(client: EtcdClient, election: Election, lines: asyncio.StreamReader) -> None:
    """Lead for one term; write at each line, also after the term is lost."""
    fence = await election.campaign()
    store = EtcdStore(client, fence)
    stored = await store.load("job")
    revision = stored.revision if stored else 0
    say("leads", number=await store.take_over())

    async def write() -> None:
        nonlocal revision
        while await lines.readline():
            say("asked", proven=election.proven)
            try:
                # A write lost to another term is no conflict, so the record is read again first.
                stored = await store.load("job")
                revision = stored.revision if stored else 0
                membership = replace(MEMBERSHIP, run=election.address)
                revision = await store.compare_and_swap("job", membership, revision)
                say("written")
            except RendezvousError as error:
                say("refused", error=type(error).__name__, text=str(error))

    async def watch() -> None:
        say("lost", reason=await election.lost())

    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        group.create_task(watch())


async def main(endpoints: str, prefix: str, address: str, ttl_s: str) -> None:
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    config = EtcdConfig.parse(endpoints, prefix=prefix, ttl_s=int(ttl_s))
    async with (
        EtcdClient.connected(config) as client,
        Election.running(client, address) as election,
    ):
        await lead(client, election, lines)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
