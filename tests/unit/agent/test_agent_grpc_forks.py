"""Programs that the agent starts as another account are not forked through gRPC's handlers."""

import subprocess
import sys

import pytest

from tests.support.accounts import needs_root

pytestmark = pytest.mark.slow

SCRIPT = """
import os, subprocess, threading
import rdzv.agent.__main__
import grpc
from concurrent.futures import ThreadPoolExecutor

assert "GRPC_ENABLE_FORK_SUPPORT" not in os.environ

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((Echo(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
done, begun = threading.Event(), threading.Event()

def call():
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/echo/echo")
        while not done.is_set():
            ask(b"x")
            begun.set()

thread = threading.Thread(target=call)
thread.start()
begun.wait(60)
for _ in range(20):
    subprocess.run(["/bin/true"], user=64321, group=64322, extra_groups=[], check=True)
done.set()
thread.join()
server.stop(None).wait()
"""


@needs_root
def test_no_handler_of_grpc_runs_in_what_is_started_as_another_account() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # gRPC may log other lines, too.
    assert "fork" not in done.stderr
