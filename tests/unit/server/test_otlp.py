"""Spans on their way to a collector: a real one as far as OTLP over HTTP is concerned."""

from __future__ import annotations

import asyncio
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from collector import collecting, plain
from stories import STORIES, told

from rdzv.errors import InvalidRequestError
from rdzv.server.settings import config as config_module
from rdzv.server.settings.config import Config, check_otlp
from rdzv.server.telemetry.otlp import OtlpSender
from rdzv.server.telemetry.traces import TraceSpan, tracing
from rdzv.transport.endpoints import Listen
from tests.unit.server.test_traces import rows_of, unread

pytestmark = pytest.mark.slow

CLOSE_MS = 60_000
SPAN = TraceSpan("night", "run-1", "round 0", "", "round 0", 1_000, 2_000, {})
CONFIG = Config(Listen("127.0.0.1", 0), Path("/nowhere"))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


async def test_a_run_arrives_as_a_trace() -> None:
    story, rdzv_id = STORIES["crashes"]
    of = await told(story, rdzv_id)
    with collecting() as collector:
        sender = OtlpSender(collector.url, "1.2.3")
        async with tracing(unread, sender.send) as traces:
            traces.recorded(rows_of(of, rdzv_id))
        await sender.close(CLOSE_MS)
    assert len({span.trace_id for span in collector.spans}) == 1
    ids = {span.span_id: span for span in collector.spans}
    assert len(ids) == len(collector.spans)
    (run,) = [span for span in collector.spans if not span.parent_span_id]
    assert run.name == "run of job-7"
    rounds = [span for span in collector.spans if span.parent_span_id == run.span_id]
    assert [span.name for span in rounds] == [f"round {number}" for number in range(21)]
    for span in collector.spans:
        assert span is run or span.parent_span_id in ids
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    third = rounds[3]
    said = plain(third.attributes)
    assert said["rdzv.cause"] == "worker failure"
    assert said["rdzv.nodes"] == 1
    assert [value.string_value for value in said["rdzv.participants"].values] == ["n1"]
    assert third.status.code == third.status.STATUS_CODE_ERROR
    assert "exit code 1" in third.status.message
    assert [event.name for event in third.events if event.name == "WorkerFailed"]
    phases = [span.name for span in collector.spans if span.parent_span_id == third.span_id]
    assert phases == ["live", "stopping"], "the one node had stopped, and so the next round formed"
    assert {resource["service.name"] for resource in collector.resources} == {"rdzvd"}
    assert {resource["service.version"] for resource in collector.resources} == {"1.2.3"}


async def test_two_servers_send_the_same_ids() -> None:
    with collecting() as collector:
        for _ in range(2):
            sender = OtlpSender(collector.url + "/v1/traces/", "1.2.3")
            sender.send(SPAN)
            await sender.close(CLOSE_MS)
    one, other = collector.spans
    assert (one.trace_id, one.span_id, one.parent_span_id) == (
        *(other.trace_id, other.span_id, other.parent_span_id),
    )


async def test_the_environment_says_what_the_configuration_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
        sender = OtlpSender("env", "1.2.3")
        sender.send(SPAN)
        await sender.close(CLOSE_MS)
    assert collector.headers[0]["x-tenant"] == "a"
    (resource,) = collector.resources
    assert resource["service.name"] == "ours" and resource["deployment.environment"] == "lab"


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_SAMPLER", "always_off"), ("OTEL_SDK_DISABLED", "true")]
)
async def test_the_environment_may_turn_it_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with collecting() as collector:
        sender = OtlpSender(collector.url, "1.2.3")
        sender.send(SPAN)
        await sender.close(CLOSE_MS)
    assert not collector.spans


async def test_a_sampled_run_is_sent_with_all_its_rounds_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    with collecting() as collector:
        sender = OtlpSender(collector.url, "1.2.3")
        for number in range(50):
            for key, parent in (("round 0", ""), ("", None)):
                run = f"run-{number}"
                sender.send(TraceSpan("night", run, key, parent, run, 1_000, 2_000, {}))
        await sender.close(CLOSE_MS)
    names = [span.name for span in collector.spans]
    assert 0 < len(set(names)) < 50
    assert all(names.count(name) == 2 for name in names)


async def test_a_collector_that_hangs_holds_up_neither_the_server_nor_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collecting() as collector:
        collector.answers.clear()
        sender = OtlpSender(collector.url, "1.2.3")
        for _ in range(5_000):
            sender.send(SPAN)
        async with asyncio.timeout(100):
            await sender.close(within_ms=50)
        assert caplog.messages[-1] == (
            f"dropped the last traces because {collector.url}/v1/traces did not accept them"
        )
        # Its threads, which wait random times between attempts, must not outlive the test.
        collector.answers.set()
        for thread in threading.enumerate():
            if thread.name == "otlp-close":
                await asyncio.to_thread(thread.join, 100)
                assert not thread.is_alive()


async def test_a_variable_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(InvalidRequestError, match=r"cannot be set up: .*variables OTEL_\*"):
        OtlpSender("http://127.0.0.1:1", "1.2.3")


@pytest.mark.parametrize("text", ["collector:4318", "ftp://c", "http://", "", "grpc://c:4317"])
def test_what_is_no_collector_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a collector; give a URL such as"):
        check_otlp(text)


@pytest.mark.parametrize("text", ["env", "http://127.0.0.1:4318", "https://otlp.example/api/otlp"])
def test_where_a_collector_may_be(text: str) -> None:
    check_otlp(text)


@pytest.mark.parametrize("raises", [True, False])
def test_without_the_extra_it_is_said_what_to_install(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str) -> None:
        if raises:
            raise ModuleNotFoundError(name)

    config = Config(CONFIG.listen, CONFIG.data_dir, otlp="env")
    config.check()
    assert find_spec("opentelemetry.exporter.otlp.proto.http"), "the tests have it"
    monkeypatch.setattr(config_module, "find_spec", none)
    with pytest.raises(InvalidRequestError, match=r"pip install 'rdzv\[otel\]', or leave"):
        config.check()
    CONFIG.check()
