"""The command that demonstrates rdzv on this machine."""

from __future__ import annotations

import os
import sys

import click


@click.command("demo")
@click.option(
    "--python",
    metavar="PATH",
    help="The interpreter with torch that trains; default: PYTHON_EXEC, else rdzvctl's own.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the files, and keep the server and its page running until Ctrl-C.",
)
def demo_command(python: str | None, keep: bool) -> int:
    """Run a real training job on this machine that loses a worker, then a node, and continues.

    It starts a server and two nodes on free loopback ports, trains a small model on the CPU, and
    finishes by itself within a minute or two. It contacts no other server and leaves nothing
    behind.
    """
    from rdzv.demo import story

    story.play(python or os.environ.get("PYTHON_EXEC") or sys.executable, keep=keep)
    return 0
