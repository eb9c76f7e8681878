"""Replaces `python -m torch.distributed.launch`: rdzvrun for scripts that require --local-rank.

    python -m rdzv.agent.distributed_launch [--use-env] [rdzvrun's options] script ...

Without --use-env, every worker gets `--local-rank=N` before the script's own arguments.

Source: `torch/distributed/launch.py` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from rdzv.agent import run


def main(argv: Sequence[str] | None = None) -> NoReturn:
    run.main(argv, legacy=True)


if __name__ == "__main__":
    main()
