"""Sends spans to an OpenTelemetry collector by OTLP over HTTP, from the SDK's own thread.

OTEL_* variables set further options: headers, certificates, timeouts, sampling, limits and resource
names. This module needs the extra `rdzv[otel]`, and is loaded only if traces are sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision

from rdzv.errors import InvalidRequestError
from rdzv.server.settings.config import OTLP_ENVIRONMENT
from rdzv.server.telemetry.traces import TraceSpan

log = logging.getLogger("rdzv.traces")

_PATH = "/v1/traces"
"""The path at which a collector accepts traces."""


class _Names(IdGenerator):
    """Derives the next span's ids from its names, so that all servers generate the same ids."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def take(self, span: TraceSpan) -> None:
        self.trace_id, self.span_id = trace_id_of(span), span_id_of(span, span.key)

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


def trace_id_of(span: TraceSpan) -> int:
    return _digest(16, span.rdzv_id, span.run)


def span_id_of(span: TraceSpan, key: str) -> int:
    return _digest(8, span.rdzv_id, span.run, key)


def _digest(size: int, *names: str) -> int:
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return int.from_bytes(digest[:size], "big")


class OtlpSender:
    """Queues spans and sends them from a thread. Spans that are refused or too many are dropped."""

    def __init__(self, endpoint: str, version: str) -> None:
        """Send to `endpoint` or, if it is `env`, to the address in OTEL_EXPORTER_OTLP_ENDPOINT.

        Raises:
            InvalidRequestError: an OTEL_* variable is invalid.

        """
        to = None if endpoint == OTLP_ENVIRONMENT else endpoint.rstrip("/")
        if to is not None and not to.endswith(_PATH):
            to += _PATH
        self._to = to or "the collector"
        self._names = _Names()
        ours = {"service.name": "rdzvd", "service.version": version}
        try:
            resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
            self._provider = TracerProvider(
                resource=resource, id_generator=self._names, shutdown_on_exit=False
            )
            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=to)))
        except ValueError as error:
            raise InvalidRequestError(
                f"OpenTelemetry cannot be set up: {error}; look at the variables OTEL_* of "
                "rdzvd's environment"
            ) from error
        self._tracer = self._provider.get_tracer("rdzv", version)

    def send(self, span: TraceSpan) -> None:
        """Queue a span without waiting."""
        self._names.take(span)
        made = self._tracer.start_span(
            span.name,
            context=None if span.parent is None else self._below(span, span.parent),
            start_time=_ns(span.since_ms),
            attributes=span.attributes,
        )
        for at_ms, name, text in span.happenings:
            made.add_event(name, {"text": text}, timestamp=_ns(at_ms))
        if span.wrong:
            made.set_status(api.Status(api.StatusCode.ERROR, span.wrong))
        made.end(_ns(span.until_ms))

    def _below(self, span: TraceSpan, key: str) -> Context:
        trace_id = trace_id_of(span)
        decision = self._provider.sampler.should_sample(None, trace_id, span.name).decision
        sampled = decision is Decision.RECORD_AND_SAMPLE
        flags = api.TraceFlags.SAMPLED if sampled else api.TraceFlags.DEFAULT
        parent = api.SpanContext(
            trace_id, span_id_of(span, key), is_remote=True, trace_flags=api.TraceFlags(flags)
        )
        return api.set_span_in_context(api.NonRecordingSpan(parent))

    async def close(self, within_ms: int) -> None:
        """Send queued spans for at most `within_ms`, then drop the rest."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            # If this took too long, the caller has stopped waiting, and its loop may be closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        # Do not use one of the executor's threads, because the interpreter would wait for it at
        # exit.
        threading.Thread(target=shut_down, name="otlp-close", daemon=True).start()
        try:
            async with asyncio.timeout(within_ms / 1000):
                await done.wait()
        except TimeoutError:
            log.warning("dropped the last traces because %s did not accept them", self._to)


def _ns(ms: int) -> int:
    return ms * 1_000_000
