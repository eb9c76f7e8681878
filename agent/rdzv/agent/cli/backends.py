"""Where a job's nodes meet: at one of torchrun's back-ends, or at a standing rdzvd.

The node that serves has node rank 0 (`static`) or owns the endpoint's host (`c10d`), and serves
from memory as long as its rdzvrun lives. With `etcd`, the nodes elect the server through etcd.

Source: `torch/distributed/run.py` (`config_from_args`) and the rendezvous back-ends of torch 2.13.
"""

from __future__ import annotations

import re
import socket
import uuid
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rdzv.errors import InvalidRequestError, did_you_mean
from rdzv.structs import struct
from rdzv.transport.addresses import listen_at
from rdzv.transport.endpoints import DEFAULT_PORT, Endpoint, parse_endpoint, parse_endpoints

if TYPE_CHECKING:
    # gRPC is imported only once the command line is known to be valid.
    from rdzv.stores.etcd_config import EtcdConfig
    from rdzv.transport.channels import Credentials

DEFAULT_MASTER_PORT = 29500

_KNOWN = ("rdzv", "c10d", "etcd", "static")


@struct(frozen=True)
class Meeting:
    """Where this node meets the other nodes."""

    endpoints: tuple[Endpoint, ...]
    """The servers to connect to. If empty, this node hosts a server only for itself."""
    rdzv_id: str
    host_at: Endpoint | None = None
    """Where this node serves the job, or only its own workers without `endpoints`."""
    elect_by: EtcdConfig | None = None
    """The etcd cluster in which the nodes elect their server."""
    node_id: str = ""
    master: Endpoint | None = None
    """MASTER_ADDR and MASTER_PORT as given. Workers reach the store of each round there."""
    why: str = ""
    files: Mapping[str, Path | None] | None = None
    """Files of `Credentials` for a standing rdzvd; None if one of the nodes serves."""

    def credentials(self, environ: Mapping[str, str]) -> Credentials:
        """The environment supplies files that are not on the command line."""
        from rdzv.transport.channels import BY_NODE, Credentials

        return BY_NODE if self.files is None else Credentials.parse(self.files, environ)


def _is_static(options: Namespace) -> bool:
    given = (options.node_rank, options.master_port)
    return bool(options.master_addr) or given != (None, None)


def _is_for_rdzvd(options: Namespace) -> bool:
    places_node = options.node_id or options.topology
    return bool(places_node or "," in options.rdzv_endpoint or any(_files(options).values()))


def _files(options: Namespace) -> dict[str, Path | None]:
    return {
        "ca": options.tls_ca,
        "cert": options.tls_cert,
        "key": options.tls_key,
        "token_file": options.token_file,
    }


def _nnodes(options: Namespace) -> str:
    low, high = options.nnodes
    return f"--nnodes={low}" if low == high else f"--nnodes={low}:{high}"


def choose(options: Namespace) -> Meeting:
    """Choose where to meet, as torchrun would interpret the same command line.

    Without a back-end, the choice is this node alone, if there is no endpoint or port and at most
    one node; `static`, if --node-rank or --master-* is given, or an endpoint for a single node
    where this node can serve as torchrun would; and otherwise an rdzvd at the endpoint.
    """
    if options.standalone or _alone(options):
        return _standalone(options)
    match options.rdzv_backend:
        case "static":
            return _static(options)
        case "c10d":
            return _c10d(options)
        case "rdzv":
            return _standing(options)
        case "":
            return _static(options) if _means_static(options) else _standing(options)
        case "etcd" | "etcd-v2":
            return _etcd(options)
        case _:
            raise InvalidRequestError(
                f"--rdzv-backend={options.rdzv_backend} is not one of {', '.join(_KNOWN)}; "
                + did_you_mean(options.rdzv_backend, _KNOWN, "give one of them")
            )


def _means_static(options: Namespace) -> bool:
    """Return whether a command line without a back-end means torchrun's default, the static one.

    With an endpoint and a single node it does, unless the endpoint can only be a standing rdzvd:
    the command line has options for one, the endpoint is on another machine, or a server is already
    listening there.
    """
    if _is_static(options) or options.nnodes[1] > 1:
        return _is_static(options)
    if not options.rdzv_id:
        return True
    if _is_for_rdzvd(options):
        return False
    return _can_serve(parse_endpoint(options.rdzv_endpoint, DEFAULT_PORT))


def _alone(options: Namespace) -> bool:
    if options.rdzv_endpoint or options.nnodes[1] > 1:
        return False
    if options.rdzv_backend in ("", "static"):
        return options.master_port is None
    return options.rdzv_backend in ("rdzv", "c10d")


def _standalone(options: Namespace) -> Meeting:
    if options.nnodes[1] > 1:
        raise InvalidRequestError(
            f"--standalone is for one node, but {_nnodes(options)} asks for more; "
            "leave one of them out"
        )
    rdzv_id = options.rdzv_id or f"standalone-{uuid.uuid4().hex[:8]}"
    return Meeting((), rdzv_id, why="one node with its own server")


def _standing(options: Namespace) -> Meeting:
    if not options.rdzv_endpoint:
        raise InvalidRequestError(
            f"{_nnodes(options)} needs a server; start rdzvd and give its address as "
            "--rdzv-endpoint=HOST:PORT"
        )
    if not options.rdzv_id:
        raise InvalidRequestError(
            "--rdzv-id is missing; without it this job could be mixed up with another; "
            "give all nodes of this job the same --rdzv-id=NAME"
        )
    endpoints = parse_endpoints(options.rdzv_endpoint)
    why = f"rdzvd at {', '.join(map(str, endpoints))}"
    if not options.rdzv_backend and options.nnodes[1] == 1 and not _is_for_rdzvd(options):
        why += "; this node cannot serve there: the port is taken, or on another machine"
    return Meeting(endpoints, options.rdzv_id, why=why, files=_files(options))


def _c10d(options: Namespace) -> Meeting:
    if not options.rdzv_endpoint:
        raise InvalidRequestError(
            f"--rdzv-backend=c10d with {_nnodes(options)} needs --rdzv-endpoint=HOST:PORT, "
            "where HOST is one of the nodes"
        )
    if (host := _host_at_any_port(options.rdzv_endpoint)) is not None:
        return _c10d_at_any_port(options, host)
    endpoint = parse_endpoint(options.rdzv_endpoint, DEFAULT_PORT)
    hosts = _hosts(options, endpoint.host)
    where = "this node serves" if hosts else "served by the node that owns it"
    if _is_static(options):
        where += "; --node-rank and --master-* have no effect with c10d"
    return Meeting(
        (endpoint,),
        options.rdzv_id or "none",
        host_at=endpoint if hosts else None,
        why=f"c10d at {endpoint}, {where}",
    )


def _hosts(options: Namespace, host: str) -> bool:
    is_host: bool | None = options.rdzv_conf["is_host"]
    return owns(host) if is_host is None else is_host


def _host_at_any_port(endpoint: str) -> str | None:
    """Return an endpoint's host if its port is 0, or None if it has another port.

    >>> _host_at_any_port("localhost:0"), _host_at_any_port("localhost:10")
    ('localhost', None)
    """
    host, _, port = endpoint.strip().rpartition(":")
    return host if port == "0" else None


def _c10d_at_any_port(options: Namespace, host: str) -> Meeting:
    """Serve only this node, because no other node can know a port chosen by the system."""
    hosts = _hosts(options, parse_endpoint(host).host)
    if options.nnodes[0] > 1 or not hosts:
        raise InvalidRequestError(
            f"--rdzv-endpoint={options.rdzv_endpoint}: port 0 means any free port of the node "
            f"that owns {host}, which other nodes cannot know; give a port, e.g. "
            f"{host}:{DEFAULT_PORT}"
        )
    why = "c10d at a free port, which only this node knows: it has its own server"
    return Meeting((), options.rdzv_id or "none", why=why)


def _etcd(options: Namespace) -> Meeting:
    """Both names mean etcd's v3 API here; torchrun's use v2, which was removed in etcd 3.6."""
    given = f"--rdzv-backend={options.rdzv_backend}"
    if not options.rdzv_endpoint:
        raise InvalidRequestError(f"{given} needs --rdzv-endpoint=HOST:PORT of an etcd v3")
    if not options.rdzv_id:
        raise InvalidRequestError(
            f"--rdzv-id is missing; with {given} all jobs share one etcd, and this one "
            "could be mixed up with another; give all nodes of this job the same "
            "--rdzv-id=NAME"
        )
    etcd = _etcd_config(options)
    return Meeting(
        etcd.endpoints,
        options.rdzv_id,
        elect_by=etcd,
        why=f"served by an elected node, {etcd.place}",
    )


def _etcd_config(options: Namespace) -> EtcdConfig:
    from rdzv.stores.etcd_config import EtcdConfig, first_line

    conf = options.rdzv_conf
    protocol, password = conf["protocol"], conf["etcd_password_file"]
    if protocol not in ("http", "https"):
        raise InvalidRequestError(f"--rdzv-conf: protocol={protocol} is unknown; use http or https")
    endpoints = [part for part in map(str.strip, options.rdzv_endpoint.split(",")) if part]
    return EtcdConfig.parse(
        ",".join(e if "://" in e else f"{protocol}://{e}" for e in endpoints),
        # Each job elects its own server, so each has its own key prefix in etcd.
        prefix=f"{conf['etcd_prefix'].rstrip('/')}/{_as_path(options.rdzv_id)}",
        user=conf["etcd_user"],
        password=first_line(password) if password else "",
        ca=conf["cacert"],
        cert=conf["cert"],
        key=conf["key"],
    )


def _as_path(rdzv_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", lambda found: f"_{ord(found[0]):x}_", rdzv_id)


def _static(options: Namespace) -> Meeting:
    if options.nnodes[0] != options.nnodes[1]:
        raise InvalidRequestError(
            f"{_nnodes(options)}: the static back-end needs a fixed number of nodes; "
            "give one number, or use an rdzvd"
        )
    node_rank = options.node_rank or 0
    if not 0 <= node_rank < options.nnodes[1]:
        raise InvalidRequestError(
            f"--node-rank={node_rank} is out of bounds; with {_nnodes(options)} give 0 to "
            f"{options.nnodes[1] - 1}"
        )
    if options.rdzv_endpoint:
        endpoint = parse_endpoint(options.rdzv_endpoint, DEFAULT_MASTER_PORT)
    else:
        port = DEFAULT_MASTER_PORT if options.master_port is None else options.master_port
        endpoint = Endpoint(options.master_addr or "127.0.0.1", port)
    where = "this node serves" if node_rank == 0 else "served by node rank 0"
    return Meeting(
        # One node needs no rendezvous there; its workers may use the address for their store.
        (endpoint,) if options.nnodes[1] > 1 else (),
        options.rdzv_id or "none",
        host_at=endpoint if node_rank == 0 else None,
        node_id=f"node-rank-{node_rank:05d}",
        master=endpoint,
        why=f"static, node rank {node_rank} of {options.nnodes[1]}, at {endpoint}, {where}",
    )


def owns(host: str) -> bool:
    if host == socket.gethostname():
        return True  # As under torchrun, also while nothing can be looked up.
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_serve(endpoint: Endpoint) -> bool:
    if not owns(endpoint.host):
        return False
    try:
        listen_at(endpoint.host, endpoint.port).close()
    except OSError:
        return False
    return True


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
            return True
    except OSError:
        return False
