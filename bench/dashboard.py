"""A dashboard of the demo, as a picture: docs/img/dashboard.svg.

Plays `rdzvctl demo` beside a real Prometheus, and draws the scraped metrics.

    python bench/dashboard.py [FILE]
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import draw

from rdzv.demo.story import JOB, Demo, DemoError

ROOT = Path(__file__).parents[1]

PICTURE = ROOT / "docs" / "img" / "dashboard.svg"

Samples = list[tuple[float, float]]
"""Unix times, and values."""


class Watched(Demo):
    """The demo, scraped from its beginning; remembers the time of each action."""

    deadline_s = 480.0
    """A picture may take its time, on a busy machine."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(directory, sys.executable)
        self.stack = stack
        self.prometheus = ""
        self.marks: list[tuple[float, str]] = []

    def start_server(self) -> None:
        """Start rdzvd, and Prometheus."""
        super().start_server()
        scraping = prometheus(self.folder, self.http)
        self.prometheus = self.stack.enter_context(scraping)

    def do(self, deed: str, text: str) -> float:
        """Print the next action, and remember it."""
        self.marks.append((time.time(), deed))
        return super().do(deed, text)


@contextlib.contextmanager
def prometheus(folder: Path, http: str) -> Iterator[str]:
    """Run a Prometheus that scrapes this server; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = urllib.parse.urlsplit(http).netloc
    scrape = {"job_name": "rdzv", "static_configs": [{"targets": [server]}]}
    config = {"global": {"scrape_interval": "250ms"}, "scrape_configs": [scrape]}
    # Every JSON document is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def scraped(prometheus: str, metric: str) -> dict[str, Samples]:
    """Return all samples of a metric of the job, by the value of its second label."""
    query = urllib.parse.urlencode({"query": f'{metric}{{rdzv_id="{JOB}"}}[1h]'})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=10) as answer:
        found = json.load(answer)["data"]["result"]
    named = {"__name__", "rdzv_id", "job", "instance"}
    return {
        "".join(value for label, value in one["metric"].items() if label not in named): [
            (at, float(value)) for at, value in one["values"]
        ]
        for one in found
    }


def changes(samples: Samples) -> Samples:
    """Keep only samples that differ from the previous one, and the last."""
    return [samples[0], *(b for a, b in pairwise(samples) if a[1] != b[1]), samples[-1]]


def ends(counted: Mapping[str, Samples]) -> list[draw.Pile]:
    """Return how many rounds ended when, by cause."""
    grown: dict[float, list[tuple[str, float]]] = {}
    for cause, samples in sorted(counted.items()):
        for before, (at, number) in pairwise(samples):
            if number > before[1]:
                grown.setdefault(at, []).append((cause, number - before[1]))
    return [draw.Pile(at, tuple(parts)) for at, parts in sorted(grown.items())]


def recoveries(sums: Mapping[str, Samples], counts: Mapping[str, Samples]) -> list[draw.Pile]:
    """Return the duration of each recovery, by phase, at the time when its round was complete."""
    piles: dict[float, dict[str, float]] = {}
    completed: dict[float, float] = {}
    for phase in ("stop", "form"):
        values = dict(sums[phase])
        for before, (at, number) in pairwise(counts[phase]):
            if number > before[1]:
                piles.setdefault(number, {})[phase] = values[at] - values[before[0]]
                completed[number] = at
    return [draw.Pile(completed[n], tuple(parts.items())) for n, parts in piles.items()]


def picture(prometheus: str, marks: Sequence[tuple[float, str]]) -> str:
    """Draw what was scraped."""
    states = scraped(prometheus, "rdzv_job_state").values()
    times = [at for samples in states for at, _ in samples]
    began, until = min(times), max(times)

    def steps(name: str, samples: Samples, *, bound: bool = False) -> draw.Steps:
        return draw.Steps(name, tuple((at - began, v) for at, v in changes(samples)), bound)

    nodes = scraped(prometheus, "rdzv_job_nodes")
    bounds = {b: scraped(prometheus, f"rdzv_job_{b}_nodes")[""] for b in ("max", "min")}
    lasted = [scraped(prometheus, f"rdzv_job_recovery_seconds_{part}") for part in ("sum", "count")]

    def piles(found: list[draw.Pile]) -> tuple[draw.Pile, ...]:
        return tuple(draw.Pile(pile.at - began, pile.parts) for pile in found)

    drawn = (
        draw.Panel(
            "Nodes with a seat, against min and max",
            (
                steps("seated", nodes["seated"]),
                *(steps(name, samples, bound=True) for name, samples in bounds.items()),
            ),
        ),
        draw.Panel(
            "Rounds that ended, by cause",
            piles=piles(ends(scraped(prometheus, "rdzv_job_rounds_ended_total"))),
        ),
        draw.Panel("Recovery by phase, seconds", piles=piles(recoveries(*lasted))),
        draw.Panel(
            "Step of the slowest worker",
            (steps("step", scraped(prometheus, "rdzv_job_min_step")[""]),),
        ),
    )
    title = "rdzvctl demo, as Prometheus has scraped it"
    shown = [(at - began, name) for at, name in marks]
    return draw.panels(title, "seconds", until - began, drawn, shown)


def main() -> None:
    """Play the demo, and write the picture."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            demo = Watched(Path(folder), stack)
            try:
                demo.play()
                demo.await_until(lambda: _over(demo.prometheus), "the end to be scraped")
                file.write_text(picture(demo.prometheus, demo.marks))
            finally:
                demo.stop()
    except DemoError as error:
        sys.exit(f"demo failed: {error}")
    print(f"written: {file}")


def _over(prometheus: str) -> bool:
    with contextlib.suppress(urllib.error.URLError):
        state = scraped(prometheus, "rdzv_job_state").get("succeeded", ())
        return bool(state) and state[-1][1] == 1
    return False


if __name__ == "__main__":
    main()
