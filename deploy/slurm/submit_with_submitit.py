"""Submit a training to Slurm from Python, with submitit: one rdzvrun on each node.

    pip install submitit
    python submit_with_submitit.py --endpoint rdzvd.cluster:29400 --nodes 3 --nnodes 2:2 train.py

Prints the number of the Slurm job. At the time limit submitit has the job queued again: the workers
get SIGTERM, save, and go on in the next life under the same rdzv_id.
"""

import argparse
import os
import signal
import subprocess
from pathlib import Path

import submitit

IGNORE = ("env", "--ignore-signal=USR2")
"""Slurm sends submitit's signal to all processes of a task; rdzvrun and its workers would end."""


class Rdzvrun(submitit.helpers.Checkpointable):
    """Runs on each node of the allocation."""

    def __init__(self, options: list[str]) -> None:
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        job = os.environ["SLURM_JOB_ID"]
        node = os.environ["SLURMD_NODENAME"]
        command = [*IGNORE, "rdzvrun"]
        command += [f"--rdzv-id=submitit-{job}", f"--node-id={node}.{job}", *self.options]
        self.process = subprocess.Popen(command)
        if (code := self.process.wait()) != 0:
            raise RuntimeError(f"rdzvrun on {node} ended with {code}")

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Let the workers save; submitit calls it when the time limit is near."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGTERM)
            # The signal has interrupted Popen.wait, which cannot be entered again.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Rdzvrun(self.options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--endpoint", required=True, help="HOST:PORT of an rdzvd for all nodes")
    parser.add_argument("--folder", type=Path, default=Path("submitit"), help="for logs; shared")
    parser.add_argument("--nodes", type=int, default=2, help="of the allocation")
    parser.add_argument("--nnodes", default="1:2", help="MIN:MAX of rdzvrun; the rest are spares")
    parser.add_argument("--minutes", type=int, default=60, help="Slurm's time limit")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="and its arguments")
    args = parser.parse_args()
    executor = submitit.SlurmExecutor(args.folder, max_num_timeout=10)
    executor.update_parameters(
        nodes=args.nodes,
        ntasks_per_node=1,
        time=args.minutes,
        signal_delay_s=90,
        # A node that dies, or a task that ends early, does not end the others.
        additional_parameters={"no_kill": True},
        srun_args=["--no-kill", "--kill-on-bad-exit=0", "--wait=0"],
    )
    options = [f"--rdzv-endpoint={args.endpoint}", f"--nnodes={args.nnodes}", "--max-restarts=3"]
    # rdzvrun restores the default signal handling for its workers.
    worker = ["--no-python", *IGNORE, "python", "-u", *args.script]
    job = executor.submit(Rdzvrun([*options, *worker]))
    print(job.job_id)


if __name__ == "__main__":
    main()
