"""Shared parts of the server's and agent's /metrics pages, and of the ports that serve them.

Only processes with such a page import it, because prometheus-client is large.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import accumulate

import prometheus_client
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rdzv.runtime.counts import Counts

log = logging.getLogger("rdzv.metrics")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Collect = Callable[[], Iterable[Metric]]


class PageParts:
    """The parts of a page that are computed at each scrape. Each may fail independently.

    A failed part is omitted, and is reported by a metric at each scrape. It is logged once until it
    succeeds again.
    """

    def __init__(self, metric: str, program: str) -> None:
        """Report in `metric` which parts could be computed; the log names `program`."""
        self._metric = metric
        self._program = program
        self._in_order: dict[str, bool] = {}

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Compute a part in the body, logging any exception instead of raising it."""
        try:
            yield
        except Exception:
            if self._in_order.get(name, True):
                log.exception(
                    "cannot compute the %s metrics because of a bug in %s; please report it",
                    name,
                    self._program,
                )
            self._in_order[name] = False
        else:
            self._in_order[name] = True

    def collect(self, parts: Mapping[str, Collect]) -> Iterator[Metric]:
        """Yield the metrics of `parts`, followed by the outcome of all parts computed so far."""
        for name, collect in parts.items():
            found: tuple[Metric, ...] = ()
            with self.computing(name):
                found = tuple(collect())
            yield from found
        yield by_label(
            self._metric,
            "1 if this part was computed at the scrape, 0 if it failed: the log has the reason.",
            "collector",
            {name: int(fine) for name, fine in sorted(self._in_order.items())},
        )


def counted(counts: Counts) -> Iterator[Metric]:
    for name, series in counts.series.items():
        row = series.counted
        if not row.buckets:
            counter = CounterMetricFamily(name, row.help, labels=row.labels)
            for labels, value in series.values.items():
                counter.add_metric(labels, value)
            yield counter
            continue
        histogram = HistogramMetricFamily(name, row.help, labels=row.labels)
        bounds = [*(str(float(bound)) for bound in row.buckets), "+Inf"]
        for labels, observed in series.observed.items():
            buckets = list(zip(bounds, accumulate(observed.counts), strict=True))
            histogram.add_metric(labels, buckets, observed.sum)
        yield histogram


def by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def expiry(name: str, expires: datetime | None) -> Iterator[Metric]:
    """Yield a gauge for a certificate's expiry time, or nothing if there is no certificate."""
    if expires is not None:
        yield GaugeMetricFamily(
            name, "Unix time at which the certificate in use expires.", expires.timestamp()
        )


def add_process(registry: CollectorRegistry) -> None:
    for make in (
        prometheus_client.ProcessCollector,
        prometheus_client.PlatformCollector,
        prometheus_client.GCCollector,
    ):
        make(registry=registry)


def http_log(name: str, remedy: str) -> logging.Logger:
    """Return a logger for aiohttp that logs one line, with a remedy, if a client sends no HTTP.

    The mistake is the client's, so no traceback is logged. Such a client is usually a gRPC client
    using the wrong port, which retries forever.
    """

    def in_one_line(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg += f", which is not HTTP/1.1; {remedy}"
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        return True

    log = logging.getLogger(name)
    log.addFilter(in_one_line)
    return log
