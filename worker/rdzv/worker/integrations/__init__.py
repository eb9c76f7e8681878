"""Callbacks for training frameworks: progress, a save before the node leaves, workers that stay.

`transformers` has one for Hugging Face's Trainer, `lightning` one for Lightning, and `accelerate`
makes the Accelerator of a round. Each module imports its framework, and nothing here imports these
modules, so a job needs only the framework that it uses. `report_step` and `Notice` are for custom
training loops.

The agent names two files in the environment: the step is written to `RDZV_PROGRESS_FILE`, and
`RDZV_NOTICE_FILE` says that the node is leaving. On that notice, or on SIGTERM, the framework is
asked to save. Without these files, as under torchrun, only SIGTERM works, and no progress is shown.
"""

from .notice import Notice
from .progress import report_step

__all__ = ["Notice", "report_step"]
