"""Callbacks for training frameworks.

They report progress, save before the node leaves, and keep workers. `transformers` has a callback
for Hugging Face's Trainer, `lightning` has one for Lightning, and `accelerate` creates a round's
Accelerator. Each of these modules imports its framework, and nothing here imports the modules, so a
job needs only the framework that it uses. `report_step` and `Notice` are for custom training loops.

The agent names two files in the environment: the step is written to `RDZV_PROGRESS_FILE`, and
`RDZV_NOTICE_FILE` exists once the node is leaving. On that notice, or on SIGTERM, the framework is
asked to save. Without these files, for example under torchrun, only SIGTERM works, and no progress
is shown.
"""

from ..notice import Notice, report_step

__all__ = ["Notice", "report_step"]
