"""The page of a job, as a picture: docs/img/job.png, of a made-up job behind a real server.

python bench/page.py [FILE]
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from measure import ROOT
from playwright.sync_api import sync_playwright
from served import Served, served

PICTURE = ROOT / "docs" / "img" / "job.png"
WIDE, HIGH = 1180, 1100
"""In pixels."""
NODES = [f"gpu-0{number}" for number in range(1, 9)]
MESSAGE = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TRACEBACK = f"""Traceback (most recent call last):
  File "/home/ada/train.py", line 212, in <module>
    main()
  File "/home/ada/train.py", line 188, in main
    loss.backward()
{MESSAGE}
"""


def train(s: Served, nodes: list[str], first: int, last: int, for_s: float) -> None:
    """Let the workers of these nodes make steps; two of them are a little behind at the end."""
    for part in range(5):
        step = first + (last - first) * part // 4
        for at, node in enumerate(nodes):
            behind = 4 if part == 4 and at in (2, 5) else 0
            s.progress(
                "night", node, *((rank, step - behind, 2.25) for rank in (2 * at, 2 * at + 1))
            )
        time.sleep(for_s / 5)


def fail(s: Served, node: str, message: str, traceback: str, kept: list[str]) -> None:
    """Let a worker fail, and those of some nodes be kept."""
    s.fail("night", node, message, traceback)
    time.sleep(0.5)
    s.rejoin("night", kept_on=kept)
    time.sleep(0.3)
    for other in NODES:
        how = "kept" if other in kept else "warm"
        s.started("night", other, how, how, why="it failed")
    time.sleep(0.7)


def live(s: Served) -> None:
    """Let a job lose a worker twice, and continue."""
    s.join("night", *NODES, nodes=(6, 8))
    for node in NODES:
        s.started("night", node, "cold", "cold")
    time.sleep(1)
    train(s, NODES, 1, 520, 6)
    kept = [node for node in NODES if node != "gpu-06"]
    fail(s, "gpu-06", "RuntimeError: CUDA error: an illegal memory access", "", kept)
    train(s, NODES, 521, 800, 4)
    fail(s, "gpu-03", MESSAGE, TRACEBACK, [])
    train(s, NODES, 801, 1204, 6)


def main() -> None:
    """Write the picture."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    flags = ["--no-sandbox", "--disable-gpu"]
    with served() as s, sync_playwright() as playwright:
        live(s)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": WIDE, "height": HIGH}, color_scheme="light")
        page.goto(f"{s.url}/#/job/night")
        page.locator(".restarts svg").wait_for(timeout=120_000)
        page.screenshot(path=file)
        browser.close()
    print(f"written: {file}")


if __name__ == "__main__":
    main()
