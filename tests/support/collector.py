"""An OpenTelemetry collector, which receives and remembers what is sent by OTLP over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """Everything received, in order."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    """Whether requests are answered; initially set."""

    def named(self) -> dict[str, Any]:
        """Return the spans by name; the last of those with the same name."""
        return {span.name: span for span in self.spans}


def plain(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Collect at a free port until the body ends."""
    collector = Collector()
    collector.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.answers.wait()
            assert self.path == "/v1/traces", self.path
            collector.headers.append({k.lower(): v for k, v in self.headers.items()})
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                collector.resources.append(plain(resource.resource.attributes))
                for scope in resource.scope_spans:
                    collector.spans += scope.spans
            # A client that was told to stop waits for no answer.
            with contextlib.suppress(ConnectionError):
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            collector.answers.set()
            server.shutdown()
            thread.join()
