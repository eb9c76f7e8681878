"""Callbacks for training frameworks: progress, a save before the node leaves, workers that stay.

`transformers` has one for Hugging Face's Trainer, `lightning` one for Lightning, and `accelerate`
makes the Accelerator of a round. Each module imports its framework, and nothing here imports them,
so a job needs the one that it uses. `report_step` and `Notice` serve a loop of one's own.

In come the files that the agent names in the environment (`RDZV_PROGRESS_FILE`,
`RDZV_NOTICE_FILE`) and SIGTERM. Out goes the step to the one file, and to the framework the wish
to save. Without these files, as under torchrun, only SIGTERM is left, and no progress is shown.
"""

from .notice import Notice
from .progress import report_step

__all__ = ["Notice", "report_step"]
