"""A process with our client, agent or plug-in is forked without gRPC's handlers."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, threading
import {module}
import grpc
from concurrent.futures import ThreadPoolExecutor
from rdzv.transport import grpc_forks

assert grpc_forks.OPTION not in os.environ
assert not grpc_forks.TOO_LATE

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((Echo(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
done, begun = threading.Event(), threading.Event()

def call():
    with grpc.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        ask = channel.unary_unary("/echo/echo")
        while not done.is_set():
            ask(b"x")
            begun.set()

thread = threading.Thread(target=call)
thread.start()
begun.wait(60)
ended = []
for _ in range(50):
    child = os.fork()
    if not child:
        # gRPC's handlers, if there were any, would have started its threads here again.
        os._exit(len(os.listdir("/proc/self/task")) - 1)
    ended.append(os.waitpid(child, 0)[1])
done.set()
thread.join()
server.stop(None).wait()
assert not any(ended), ended
"""


@pytest.mark.parametrize("module", ["rdzv.agent.__main__", "rdzv.client", "rdzv.torchrun.handler"])
def test_no_handler_of_grpc_runs_in_a_fork(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(module=module)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # gRPC may log other lines, too.
    assert "fork" not in done.stderr


@pytest.mark.parametrize(("given", "late"), [("", True), ("1", True), ("0", False)])
def test_grpc_that_was_imported_before_keeps_its_handlers(given: str, late: bool) -> None:
    script = (
        "import os, sys\n"
        f"if {given!r}: os.environ['GRPC_ENABLE_FORK_SUPPORT'] = {given!r}\n"
        "import grpc, rdzv.client\n"
        "from rdzv.transport import grpc_forks\n"
        f"assert os.environ.get(grpc_forks.OPTION, '') == {given!r}\n"
        "sys.exit(grpc_forks.TOO_LATE)"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == late
