"""A stand-in for the API server of Kubernetes: list and watch of nodes and pods, and its failures.

It is not an API server: it has no schemas, rights or other kinds. Its protocol follows the
documents of Kubernetes' API: pages, resource versions, bookmarks, and 410 Gone as a status and as
an event.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]

BOOKMARK_EVERY_S = 0.05


def until(holds: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s, "in time"
        time.sleep(0.005)


def machine(name: str, *taints: str, **more: Any) -> Object:
    """Return a node."""
    spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}
    return {"metadata": {"name": name}, "spec": {**spec, **more}, "status": {}}


def pod(name: str, namespace: str = "team-a", on: str = "gpu-7", **metadata: Any) -> Object:
    """Return a pod that runs rdzvrun."""
    named = {"name": name, "namespace": namespace, "labels": {"rdzv": "node"}, **metadata}
    spec = {"nodeName": on, "terminationGracePeriodSeconds": 60}
    return {"metadata": named, "spec": spec, "status": {"phase": "Running"}}


class StandIn:
    """A running stand-in; its attributes may be changed at any time."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[dict[str, str]] = []
        """The queries of all requests, with `path`."""
        self.refuses: int | None = None
        """The status with which every request is answered."""
        self.slow_s = 0.0
        """The delay before an answer begins."""
        self.says_version: str | None = None
        """Sent in lists instead of their resource version."""
        self.gone_as_event = False
        self.page: int | None = None
        """The number of objects in a page, if fewer than requested."""
        self._changed = threading.Condition()
        self._version = 100
        self._oldest = 0
        self._events: list[tuple[int, str, str, Object]] = []
        self._objects: dict[str, dict[str, Object]] = {"nodes": {}, "pods": {}}
        self._cuts = 0
        self._stopped = False

    # ---------------------------------------------------------------- the cluster

    def put(self, item: Object) -> None:
        """Add an object, or change it."""
        kind, key = _place(item)
        self._happen("MODIFIED" if key in self._objects[kind] else "ADDED", item)

    def delete(self, item: Object) -> None:
        self._happen("DELETED", item)

    def forget(self) -> None:
        """Forget all versions up to now, and end the watches, as a compaction does."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
        self.cut()

    def cut(self) -> None:
        """Cut all watches in the middle of a line."""
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    def lose_next(self, item: Object) -> None:
        """Change an object without an event, like a server that has served stale data."""
        kind, key = _place(item)
        with self._changed:
            self._objects[kind][key] = item

    def _happen(self, event: str, item: Object) -> None:
        kind, key = _place(item)
        with self._changed:
            self._version += 1
            versioned = {
                **item,
                "metadata": {**item["metadata"], "resourceVersion": str(self._version)},
            }
            if event == "DELETED":
                self._objects[kind].pop(key, None)
            else:
                self._objects[kind][key] = versioned
            self._events.append((self._version, kind, event, versioned))
            self._changed.notify_all()

    # ---------------------------------------------------------------- its answers

    def list(self, kind: str, query: dict[str, str]) -> Object:
        with self._changed:
            items = [self._objects[kind][key] for key in sorted(self._objects[kind])]
            version = str(self._version)
        if "labelSelector" in query:
            name, _, value = query["labelSelector"].partition("=")
            items = [i for i in items if i["metadata"].get("labels", {}).get(name) == value]
        first = int(query.get("continue", 0))
        limit = self.page or int(query["limit"])
        more = str(first + limit) if len(items) > first + limit else ""
        metadata = {"resourceVersion": version, "continue": more}
        if self.says_version is not None:
            metadata["resourceVersion"] = self.says_version
        return {"items": items[first : first + limit], "metadata": metadata}

    def watch(self, kind: str, query: dict[str, str]) -> Iterator[bytes | None]:
        """Yield lines; None cuts the connection."""
        until_s = time.monotonic() + float(query["timeoutSeconds"])
        asked = query["resourceVersion"]
        at = int(asked) if asked.isdecimal() else 0
        with self._changed:
            cuts = self._cuts
            if at < self._oldest:
                gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
                yield _line("ERROR", gone)
                return
        while time.monotonic() < until_s and not self._stopped:
            with self._changed:
                if at >= self._version and self._cuts == cuts:
                    self._changed.wait(BOOKMARK_EVERY_S)
                new = [one for one in self._events if one[0] > at and one[1] == kind]
                # A watch that starts in the future gets no events until then.
                at = max(at, self._version)
            for _, _, event, item in new:
                yield _line(event, item)
            if self._cuts != cuts:
                yield b'{"type": "MODIFIED", "object": {"metadata": {"na'
                yield None
            if not new and query.get("allowWatchBookmarks") == "true":
                yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(at)}})

    def gone(self, query: dict[str, str]) -> bool:
        """Return whether a watch is answered with the status 410."""
        at = query.get("resourceVersion", "")
        return not self.gone_as_event and at.isdecimal() and int(at) < self._oldest

    def stop(self) -> None:
        self._stopped = True
        self.cut()

    def kubeconfig(self, file: Path) -> Path:
        """Write a kubeconfig for this server."""
        named = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}]
        }
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        whole = {**named, "contexts": [context], "current-context": "x", "kind": "Config"}
        file.write_text(json.dumps({**whole, "users": [{"name": "u", "user": {}}]}))
        return file


def _place(item: Object) -> tuple[str, str]:
    metadata = item["metadata"]
    kind = "pods" if "namespace" in metadata else "nodes"
    return kind, f"{metadata.get('namespace', '')}/{metadata['name']}"


def _line(event: str, item: Object) -> bytes:
    return json.dumps({"type": event, "object": item}).encode() + b"\n"


@contextmanager
def standing_in() -> Iterator[StandIn]:
    """Serve a stand-in on loopback until the body ends."""
    stand_in = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            stand_in.asked.append({"path": parts.path, **query})
            time.sleep(stand_in.slow_s)
            kind = parts.path.rpartition("/")[2]
            if stand_in.refuses is not None:
                self.send_error(stand_in.refuses)
            elif "watch" not in query:
                self.answer(json.dumps(stand_in.list(kind, query)).encode())
            elif stand_in.gone(query):
                self.send_error(410)
            else:
                self.stream(stand_in.watch(kind, query))

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def stream(self, lines: Iterator[bytes | None]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                if line is None:
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Ignore clients that hang up, which are part of the tests."""

    server = Server(("127.0.0.1", 0), Handler)
    stand_in.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.stop()
        server.shutdown()
        thread.join()
        server.server_close()
