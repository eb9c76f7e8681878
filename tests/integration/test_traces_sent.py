"""A real rdzvd with a configured collector: a job's rounds arrive there, also over a restart."""

from __future__ import annotations

from pathlib import Path

from cluster import cluster_without_server
from collector import Collector, collecting, plain


def test_the_rounds_of_a_job_arrive_at_a_collector(tmp_path: Path) -> None:
    with collecting() as collector, cluster_without_server(tmp_path) as c:
        c.start_server("--otlp", collector.url)
        node = c.start_node("n1", "--max-restarts=1", worker="report.py", nnodes="1:1")
        c.wait_for_round(0, workers=1)
        # The next server has not seen this run begin.
        c.kill_server()
        c.start_server("--otlp", collector.url)
        assert c.run("rdzvctl", f"--server={c.endpoint}", "restart", "job").returncode == 0
        c.wait_for_round(1, workers=1)
        c.finish()
        assert node.wait() == 0
        assert c.server is not None
        c.server.terminate()
        c.wait_until("the collector has the run", lambda: "run of job" in collector.named())
    _check(collector)


def _check(collector: Collector) -> None:
    spans = collector.named()
    assert len({span.trace_id for span in collector.spans}) == 1
    first, second, run = spans["round 0"], spans["round 1"], spans["run of job"]
    assert first.parent_span_id == second.parent_span_id == run.span_id
    assert plain(first.attributes)["rdzv.cause"] == "operator"
    assert plain(run.attributes)["rdzv.result"] == "succeeded"
    assert run.start_time_unix_nano <= first.start_time_unix_nano, "it began under the first server"
    assert first.end_time_unix_nano <= second.end_time_unix_nano == run.end_time_unix_nano
