"""The format of --help in rdzvrun and `rdzvctl submit`."""

from __future__ import annotations

import argparse
import copy
import textwrap

DESCRIPTION = """\
Run a distributed PyTorch job on this node; a drop-in for torchrun.

  one machine        rdzvrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
  several machines   rdzvrun --rdzv-endpoint=HEAD --rdzv-id=night --nnodes=2:4 train.py
"""
EPILOG = """\
PET_<NAME> in the environment is the default of --<name>.

exit codes:
  0      success
  1      the job failed; with --exit-code=root-cause that of the worker that failed
  2      the command line is wrong
  75     no server, or too few nodes; try again
  77     permission denied
  93     the job made no progress; do not requeue it
  128+n  ended by signal n; 130 is Ctrl-C
"""


class HelpFormatter(argparse.HelpFormatter):
    """Shows flags only with dashes, although underscores are accepted, and preserves line breaks.

    Each line is wrapped separately. Indented lines of a description are left unchanged.
    """

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.split("\n") for line in textwrap.wrap(part, width)]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.rstrip().split("\n")
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width) for line in lines
        )
