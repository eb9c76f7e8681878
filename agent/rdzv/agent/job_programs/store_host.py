"""The store host: serves one round's c10d store on a socket that is already listening.

    python store_host.py --fd N --ready-fd M [--port P]

It is run by path with the job's interpreter, so it needs torch but no part of rdzv, and supports
older Python versions than rdzv itself. It writes "ready" to M once it is serving clients, and then
sleeps until killed. If there is a zygote with torch, a fork of that runs `serve` and `keep_serving`
instead.

The store's options, tested with torch 2.13:

* `master_listen_fd`: clients that connected earlier are served as soon as the store exists, so
  workers need not wait for it. The store takes ownership of the descriptor.
* `wait_for_workers=False`: otherwise the constructor would wait for all clients.
* `use_libuv` has the same value as in the workers (USE_LIBUV, on by default), so that server and
  clients are of the same kind, as under torchrun. Both kinds accept a listening socket, except
  libuv's in torch 2.4, where the older server is used for the same clients.
* `multi_tenant=False`: otherwise, stores with the same port in one process would share a server.
  There should be only one store here, and with sharing a second one would go unnoticed.
* The port is always given: libuv accepts 0 for the socket's own port; the older server does not.
* `prepare_for_many` is called first, because torch's server looks up the name of each client that
  connects, in its only serving thread, and never closes a client's connection.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import importlib.machinery
import os
import resource
import signal
import socket
import sys
import types
from datetime import timedelta
from typing import Any

PR_SET_PDEATHSIG = 1
TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Serve the store until killed. If that fails, exit with a one-line explanation."""
    die_with_parent()
    options = parse_options()
    try:
        store = serve(options.fd, options.port, whole_torch=options.whole_torch)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        sys.exit(f"rdzv store host: {type(error).__name__}: {first_line}")
    os.write(options.ready_fd, b"ready\n")
    os.close(options.ready_fd)
    keep_serving(store)


def keep_serving(store: object) -> None:
    while store is not None:
        signal.pause()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve a c10d TCPStore on a listening socket.")
    parser.add_argument("--fd", type=int, required=True, help="the listening socket")
    parser.add_argument("--ready-fd", type=int, required=True, help="written to once it is ready")
    parser.add_argument("--port", type=int, help="the expected port of the socket")
    parser.add_argument(
        "--whole-torch", action="store_true", help="import all of torch, not just its C++ part"
    )
    return parser.parse_args()


def serve(fd: int, wanted_port: int | None = None, *, whole_torch: bool) -> object:
    """Return a store that serves until deleted. `whole_torch` uses torch as it was imported."""
    host, port = reachable_at(fd)
    if wanted_port not in (None, port):
        raise ValueError(f"the socket has port {port}, not {wanted_port}")
    prepare_for_many()
    make = functools.partial(
        import_store_type(whole_torch=whole_torch),
        host,  # The store's own client connects here; the server listens at the socket's address.
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=fd,
        timeout=TIMEOUT,
    )
    try:
        return make(use_libuv=os.environ.get("USE_LIBUV", "1") == "1")
    except NotImplementedError:
        return make(use_libuv=False)


def reachable_at(fd: int) -> tuple[str, int]:
    """Return an address through which this machine can reach a listening socket, and its port."""
    sock = socket.socket(fileno=fd)
    try:
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ValueError("the socket is not listening")
        host, port = sock.getsockname()[:2]
        if host == "0.0.0.0":
            host = "127.0.0.1"
        elif host == "::":
            # IPv4 is preferred, because the loopback device may lack ::1.
            only_v6 = sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            host = "::1" if only_v6 else "127.0.0.1"
        return host, port
    finally:
        sock.detach()


def prepare_for_many() -> None:
    """Let this process hold a connection from every rank without DNS lookups.

    The soft limit on open files is often 1,024, and the connections of any further ranks are reset.
    Also, the store serves no clients while it waits for a name server that does not respond, which
    takes 5 s or more.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Only glibc has this call, which restricts lookups to /etc/hosts.
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", b"files")


def import_store_type(*, whole_torch: bool) -> Any:
    """Return the class `torch.distributed.TCPStore`, without the rest of torch if possible."""
    stay_small()
    if not whole_torch:
        try:
            return import_extension_alone()._distributed_c10d.TCPStore
        except Exception:
            # The exec discards half-imported modules and keeps the descriptors and pid.
            command = getattr(sys, "orig_argv", [sys.executable, *sys.argv])
            os.execv(sys.executable, [*command, "--whole-torch"])
    return importlib.import_module("torch.distributed").TCPStore


def import_extension_alone() -> Any:
    """Import only the C++ part of torch, which includes the store, under empty packages.

    Importing all of torch takes a second of CPU time, which is five times as long, while the first
    workers need the CPU, and half as much memory again. No other code here depends as much on
    torch's internals.
    """
    finder = importlib.machinery.PathFinder
    found = finder.find_spec("torch", sys.path)
    if found is None or not found.submodule_search_locations:
        raise ImportError("torch is not installed")
    folder = found.submodule_search_locations[0]
    for name in ("torch", "torch.distributed"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    torch: Any = sys.modules["torch"]
    torch.__path__ = [folder]
    torch.distributed = sys.modules["torch.distributed"]
    libraries = os.path.join(folder, "lib", "libtorch_global_deps.so")  # noqa: PTH118
    ctypes.CDLL(libraries, mode=ctypes.RTLD_GLOBAL)
    # Serving needs few of the 40,000 functions that torch's libraries import from each other.
    sys.setdlopenflags(os.RTLD_LAZY)
    extension: Any = importlib.import_module("torch._C")
    if not extension._c10d_init():
        raise ImportError("torch was built without distributed")
    return extension


def stay_small() -> None:
    """Keep torch from using GPUs, plug-ins and thread pools, which are not needed for serving."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        OMP_NUM_THREADS="1",
    )
    # Python puts a script's folder first, but torch must not import modules from this one.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]  # noqa: PTH100


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("rdzv store host: its parent is gone")


if __name__ == "__main__":
    main()
