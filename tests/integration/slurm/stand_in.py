"""Stands in for sbatch, srun, scancel and scontrol, depending on its name, on one machine.

It supports the options that the script may use, and refuses all others as Slurm would. srun runs
one task per node and ends with the highest exit code; a SIGTERM to srun kills all tasks at once, as
in Slurm 22.05. scancel delivers a signal to all processes of the tasks. State is kept in
$SLURM_STAND_IN: `requeue` exists after a requeue by scontrol, `tasks/` names the pid of each node.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["SLURM_STAND_IN"])
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "no-kill", "requeue", "open-mode", "signal"),
}
SRUN = {
    *("nodes", "ntasks-per-node", "no-kill", "kill-on-bad-exit", "wait", "cpus-per-task"),
}
JOB_ID = "4711"
LIVES = 5
"""How often a job is run at most."""


def options(args: list[str], known: set[str]) -> tuple[dict[str, str], list[str]]:
    """Split off the options; the first other argument ends them."""
    found = {}
    while args and args[0].startswith("--"):
        name, _, value = args.pop(0)[2:].partition("=")
        if name not in known:
            sys.exit(f"{Path(sys.argv[0]).name}: unrecognized option '--{name}'")
        found[name] = value
    return found, args


def sbatch(args: list[str]) -> int:
    """Run a script until it is not queued again."""
    given, (script, *rest) = options(args, SBATCH)
    directives = re.findall(r"^#SBATCH (\S+)", Path(script).read_text(), re.M)
    wanted, _ = options(directives, SBATCH)
    nodes = {**wanted, **given}["nodes"]
    for life in range(LIVES):
        (STATE / "requeue").unlink(missing_ok=True)
        environ = {
            **os.environ,
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_JOB_NUM_NODES": nodes,
            **({"SLURM_RESTART_COUNT": str(life)} if life else {}),
        }
        batch = subprocess.Popen(["bash", script, *rest], env=environ)
        (STATE / "batch").write_text(str(batch.pid))
        code = batch.wait()
        if not (STATE / "requeue").exists():
            return code
    return code


def srun(args: list[str]) -> int:
    """Run a task on each node."""
    given, command = options(args, SRUN)
    assert given["kill-on-bad-exit"] == "0" and given["wait"] == "0" and "no-kill" in given
    assert given["ntasks-per-node"] == "1"
    tasks: list[subprocess.Popen[bytes]] = []

    def kill_all_tasks(*_: object) -> None:
        print("srun: forcing job termination", file=sys.stderr, flush=True)
        for task in tasks:
            task.kill()

    signal.signal(signal.SIGTERM, kill_all_tasks)
    (STATE / "tasks").mkdir(exist_ok=True)
    for number in range(int(given["nodes"])):
        name = f"n{number}"
        place = {"SLURM_PROCID": str(number), "SLURMD_NODENAME": name}
        place["SLURM_TOPOLOGY_ADDR"] = f"s{number // 2}.{name}"
        tasks.append(subprocess.Popen(command, env={**os.environ, **place}))
        (STATE / "tasks" / name).write_text(str(tasks[-1].pid))
    codes = [task.wait() for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


def scancel(args: list[str]) -> int:
    """Deliver a signal to all processes of the job's first step, parents last."""
    given, targets = options(args, {"signal"})
    assert targets == [f"{JOB_ID}.0"], targets
    pids = [int(task.read_text()) for task in (STATE / "tasks").iterdir()]
    for pid in pids:  # This loop also visits the added ones.
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, children.read_text().split())
    for pid in reversed(pids):
        os.kill(pid, signal.Signals[f"SIG{given['signal']}"])
    return 0


def scontrol(args: list[str]) -> int:
    """Requeue the job."""
    assert args == ["requeue", os.environ["SLURM_JOB_ID"]], args
    (STATE / "requeue").touch()
    return 0


if __name__ == "__main__":
    programs = {"sbatch": sbatch, "srun": srun, "scancel": scancel, "scontrol": scontrol}
    sys.exit(programs[Path(sys.argv[0]).name](sys.argv[1:]))
