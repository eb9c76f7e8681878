"""Plays the agent: `agent.py FOLDER SCRIPT ARGUMENTS`.

Starts a runner, with the script as a worker and a sleeper in place of the store host; prints "up
PID" with the runner's pid. With FENCE_MS in its environment the worker gets a fence that far ahead,
never renewed, once a file `ready` exists in the folder. Then the agent is killed, or a line tells
it to kill the runner itself; in that case it cleans up and prints the runner's exit code and the
processes that it could not end.
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from rdzv.agent.core import events
from rdzv.agent.runner.processes import become_subreaper, sweep_descendants
from rdzv.agent.runner.requests import RenewFence, WorkerSpec
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner_link.runner_link import RunnerLink

READY = Path(sys.argv[1], "ready")


async def main() -> None:
    heard: asyncio.Queue[events.RunnerEvent] = asyncio.Queue()
    become_subreaper()
    link = await RunnerLink.spawn(heard.put_nowait)
    env = dict(os.environ)
    argv = (sys.executable, "-S", *sys.argv[2:])
    link.start_workers(0, [WorkerSpec(0, argv, env, None, None, None)])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        link.start_store_host(0, listening, sys.argv[1] + "/store_host", env)
    while not isinstance(await heard.get(), events.WorkerStarted):
        pass
    if fence_ms := os.environ.get("FENCE_MS"):
        while not READY.exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
        link.ask(RenewFence(boottime_ms() + int(fence_ms)))
    print("up", link.pid, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    os.kill(link.pid, signal.SIGKILL)
    while not isinstance(event := await heard.get(), events.RunnerExited):
        pass
    print("swept", event.exit_code, sweep_descendants(), flush=True)
    await link.close(10)


if __name__ == "__main__":
    stand_in = Path(sys.argv[1], "store_host")
    stand_in.write_text("#!/bin/sh\ntouch $(dirname $0)/hosting; exec sleep 1000\n")
    stand_in.chmod(0o755)
    asyncio.run(main())
