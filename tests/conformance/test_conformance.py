"""rdzvrun is a drop-in for torchrun: one table of command lines, each run under both.

Everything that a worker or the user can see must be the same, except for the differences that a
case lists, with the reason. docs/torchrun.md tells users the same, row by row.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import recording
from launchers import (
    VARIABLE,
    Case,
    Differ,
    Launched,
    Seen,
    Send,
    ready_launchers,
    under_rdzvrun,
    under_torchrun,
)
from pytest import TempPathFactory
from ready_torchrun import Start
from recording import Shown

from rdzv.errors import InvalidRequestError

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]

# ---------------------------------------------------------------------- differences

EVERYWHERE = {
    # The restart count does not distinguish two rounds if nodes come and go without cost.
    "env RDZV_ROUND",
    # Where a worker may report its progress; under torchrun nothing would read it.
    "env RDZV_PROGRESS_FILE",
    # Where a worker finds out that its node is about to leave, which torchrun's never is.
    "env RDZV_NOTICE_FILE",
    # How a worker that uses rdzv.worker reaches its runner, and how descendants are identified.
    "env RDZV_WORKER_LINK",
    "env RDZV_WORKER_MARK",
    # Whether its runner has memory for snapshots, and which of them new workers may load.
    "env RDZV_SNAPSHOTS",
    "env RDZV_SNAPSHOT",
    "env RDZV_SNAPSHOT_ORIGIN",
    # torchrun's command uses it to tell torchrun's agent which signals to handle; no worker reads
    # it.
    "env TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""Variables that only one of the launchers gives to every worker."""

ALONE = "--standalone"
TWO = "--standalone --nproc-per-node=2"
EXAMPLE_DDP = "--nnodes=1 --nproc_per_node=2 --rdzv_id=101 --rdzv_endpoint=localhost:@PORT"
MEET = "--rdzv-backend=c10d --rdzv-endpoint=localhost:@PORT --rdzv-id=job"


def refused(why: str) -> dict[str, Differ]:
    """Both refuse it; a command line that cannot work is a usage error, reported in one line."""
    return {"exit codes": Differ([1], [2], why)}


USAGE = refused("a usage error is 2, with a line that says what to do, and no traceback")


def only(torchrun: int, rdzvrun: int, code: int, why: str) -> dict[str, Differ]:
    """Only one runs workers, this many; the other exits with `code`."""
    return {
        "workers": Differ(torchrun, rdzvrun, why),
        "exit codes": Differ([0 if torchrun else code], [0 if rdzvrun else code], why),
    }


def ends(signum: signal.Signals) -> dict[str, Differ]:
    why = "128+n, as from a shell: a scheduler can tell a signal from a failure"
    return {"exit codes": Differ([1], [128 + signum], why)}


RUN_PATH = {
    "worker's stdin": Differ([""], ["typed"], "as for every other worker of one node"),
    "worker's leads its session": Differ([False], [True], "so that its whole tree can be stopped"),
    "worker's unbuffered": Differ([False], [True], "as for every other worker"),
    "worker's sys.path[0]": Differ(
        ["VENV/bin"], [""], "torchrun's own folder has no say in what a script imports"
    ),
}

RUN_PATH_ALONE = {key: differ for key, differ in RUN_PATH.items() if key != "worker's stdin"}

LAUNCH = ("python -m torch.distributed.launch", "python -m rdzv.agent.distributed_launch")

WITH_TRACEBACK = json.dumps(
    {
        "message": {
            "message": "E: gone",
            "extraInfo": {"py_callstack": "the stack", "timestamp": "7"},
        }
    }
)

WITHOUT_TRACEBACK = json.dumps({"message": "gone", "timestamp": 7})

# ---------------------------------------------------------------------- the table

CASES: list[Case] = [
    # -------------------------------------------------------------- one node, and what it runs
    Case("nothing but a script", "see.py a 'b c' ''", {"exit codes": [0], "env WORLD_SIZE": ["1"]}),
    Case(
        "arguments that look like ours",
        f"{TWO} see.py --nnodes=9 -m -- --rdzv_id x '${{local_rank}}' --log=${{local_rank}}.txt",
        {
            "worker's argv": [
                ["see.py", "--nnodes=9", "-m", "--", "--rdzv_id", "x", rank, f"--log={rank}.txt"]
                for rank in "01"
            ],
            "env OMP_NUM_THREADS": ["1", "1"],
            "env LOCAL_RANK": ["0", "1"],
        },
    ),
    Case(
        "python -m",
        f"{TWO} -- see.py a",
        {"workers": 2},
        launchers=("python -m torch.distributed.run", "python -m rdzv.agent.run"),
    ),
    Case(
        "torch.distributed.launch",
        f"{TWO} see.py a",
        {"worker's argv": [["see.py", f"--local-rank={rank}", "a"] for rank in "01"]},
        launchers=LAUNCH,
    ),
    Case(
        "torch.distributed.launch, by the environment",
        f"{TWO} --use_env -m see a",
        {"worker's argv": [["HOME/see.py", "a"]] * 2},
        launchers=LAUNCH,
    ),
    Case(
        "torch.distributed.launch of a program",
        f"{TWO} --no-python ./other_python.sh a",
        {"workers": 0},
        USAGE,
        launchers=LAUNCH,
        says=("you must also set the '--use-env' flag", "add --use-env, and read LOCAL_RANK"),
    ),
    Case(
        "underscores and short flags",
        "--standalone --nproc_per_node 2 --log_dir=@HOME/logs -r3 -mt1 see say=hello",
        {"stdout": ["[default0]:hello", "[default1]:hello"], "workers": 2},
    ),
    Case(
        "an abbreviated flag",
        "--standal --nproc-per=2 --nproc_per_nod 2 --rol trainer -mt1 --node-r=0 see a",
        {"workers": 2, "env ROLE_NAME": ["trainer"] * 2},
    ),
    Case(
        "a flag of the script's own that begins like several",
        f"{ALONE} see.py --nproc=2",
        {},
        only(0, 1, 2, "what follows the script is none of the launcher's business"),
    ),
    Case("an abbreviation of several flags", f"{ALONE} --log=x see.py", {"exit codes": [2]}),
    Case(
        "module",
        f"{ALONE} -m see read",
        {"worker's stdin": ["typed"], "worker's argv": [["HOME/see.py", "read"]]},
        stdin="typed",
    ),
    Case(
        "no python",
        f"{TWO} --no-python @PYTHON see.py ${{local_rank}}",
        {"worker's argv": [["see.py", "0"], ["see.py", "1"]], "worker's unbuffered": [False] * 2},
    ),
    Case("stdin", f"{ALONE} see.py read", {"worker's stdin": ["typed"]}, stdin="typed"),
    Case(
        "run path",
        f"{ALONE} --run-path --no-python see.py read a",
        {"worker's name": ["__main__"], "worker's argv": [["see.py", "read", "a"]]},
        RUN_PATH,
        stdin="typed",
    ),
    Case(
        "another interpreter",
        "PYTHON_EXEC=@HOME/other_python.sh REAL_PYTHON=@PYTHON --standalone see.py",
        {"env BY_THE_OTHER": ["yes"]},
    ),
    Case(
        "variables that are set stay",
        "OMP_NUM_THREADS=5 TORCH_NCCL_ASYNC_ERROR_HANDLING=3 USE_LIBUV=0 OWN=yes RANK=9 "
        f"TORCHELASTIC_RUN_ID=outer TORCH_ELASTIC_WORKER_IDENTICAL=1 {TWO} see.py",
        {
            "env OMP_NUM_THREADS": ["5", "5"],
            "env TORCH_NCCL_ASYNC_ERROR_HANDLING": ["3", "3"],
            "env OWN": ["yes", "yes"],
            "env RANK": ["0", "1"],
        },
    ),
    Case(
        "switches of torchrun's agent",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCHELASTIC_ENABLE_FILE_TIMER=1 "
        f"TORCHELASTIC_TIMER_FILE=timer TORCHELASTIC_HEALTH_CHECK_PORT=@PORT {ALONE} see.py",
        {"exit codes": [0]},
        {
            "env TORCHELASTIC_USE_AGENT_STORE": Differ(
                ["False"], ["True"], "nothing is shared here: each round has a store of its own"
            ),
        },
    ),
    Case(
        "virtual local rank",
        f"CUDA_VISIBLE_DEVICES=3,7 {TWO} --virtual-local-rank see.py",
        {"env LOCAL_RANK": ["0", "0"], "env CUDA_VISIBLE_DEVICES": ["3", "7"]},
    ),
    Case(
        "virtual local rank of all GPUs",
        f"{TWO} --virtual-local-rank see.py",
        {"env LOCAL_RANK": ["0", "0"], "env CUDA_VISIBLE_DEVICES": ["0", "1"]},
    ),
    Case(
        "a worker for each CPU",
        f"{ALONE} --nproc-per-node=cpu see.py",
        {"env LOCAL_WORLD_SIZE": ["1"]},
        launchers=("taskset -c @CPU torchrun", "taskset -c @CPU rdzvrun"),
    ),
    Case(
        "a worker for each device",
        f"CUDA_VISIBLE_DEVICES= {ALONE} --nproc-per-node=gpu see.py",
        {"workers": 0},
        USAGE,
    ),
    Case(
        "near a GPU that is not there",
        f"CUDA_VISIBLE_DEVICES= {ALONE} --numa-binding=node see.py",
        {},
        only(0, 1, 1, "without a GPU the workers are spread over the machine's nodes"),
    ),
    # -------------------------------------------------------------- PET_*
    Case(
        "everything from the environment",
        "PET_STANDALONE=1 PET_NPROC_PER_NODE=2 PET_MODULE=1 PET_ROLE=trainer PET_MAX_RESTARTS=2 "
        "PET_LOG_DIR=@HOME/logs PET_REDIRECTS=0:3 PET_TEE=1:3 PET_LOCAL_RANKS_FILTER=0,1 "
        "PET_DUPLICATE_STDOUT_FILTERS=hello PET_DUPLICATE_STDERR_FILTERS=nothing "
        "PET_VIRTUAL_LOCAL_RANK=1 PET_SIGNALS_TO_HANDLE=SIGTERM PET_SHUTDOWN_TIMEOUT=3 "
        "PET_MONITOR_INTERVAL=0.2 PET_START_METHOD=fork PET_EVENT_LOG_HANDLER=null "
        "PET_RDZV_CONF=timeout=30 PET_NO_PYTHON=0 PET_RUN_PATH=0 PET_LOCAL_ADDR=127.0.0.2 "
        "PET_NUMA_BINDING=ignored PET_LOGS_SPECS=ignored see say=hello",
        {
            "stdout": ["[trainer1]:hello"],
            "env ROLE_NAME": ["trainer", "trainer"],
            "env TORCHELASTIC_MAX_RESTARTS": ["2", "2"],
            "env MASTER_ADDR": ["127.0.0.2", "127.0.0.2"],
            "env LOCAL_RANK": ["0", "0"],
        },
    ),
    Case(
        "a flag that is set beside its variable",
        f"PET_NPROC_PER_NODE=3 PET_ROLE=reader {ALONE} --nproc-per-node=1 --role=trainer see.py",
        {"env ROLE_NAME": ["trainer"], "env WORLD_SIZE": ["1"]},
    ),
    # -------------------------------------------------------------- where nodes meet
    Case(
        "static by flags",
        "--nnodes=2 --node-rank=@NODE --master-addr=127.0.0.1 --master-port=@PORT "
        "--nproc-per-node=@COUNT --role=r@NODE --rdzv-id=job see.py",
        {
            "exit codes": [0, 0],
            "env GROUP_RANK": ["0", "1", "1"],
            "env RANK": ["0", "1", "2"],
            "env LOCAL_WORLD_SIZE": ["1", "2", "2"],
            "env ROLE_NAME": ["r0", "r1", "r1"],
            "env ROLE_RANK": ["0", "0", "1"],
            "env ROLE_WORLD_SIZE": ["1", "2", "2"],
            "env TORCHELASTIC_RUN_ID": ["job"] * 3,
        },
        nodes=2,
    ),
    Case(
        "static by variables, as Kubeflow does",
        "PET_NNODES=2 PET_NODE_RANK=@NODE PET_MASTER_ADDR=localhost PET_MASTER_PORT=@PORT "
        "PET_NPROC_PER_NODE=1 see.py",
        {
            "exit codes": [0, 0],
            "env RANK": ["0", "1"],
            "env PET_NODE_RANK": ["0", "1"],
            "env TORCHELASTIC_RUN_ID": ["none"] * 2,
        },
        nodes=2,
    ),
    Case(
        "static with an endpoint",
        "--nnodes=1 --rdzv-endpoint=127.0.0.1:@PORT see.py",
        {"env RANK": ["0"]},
    ),
    Case(
        "static alone, without a port",
        "--node-rank=0 --master-addr=localhost --nproc-per-node=2 see.py",
        {"exit codes": [0], "env TORCHELASTIC_RUN_ID": ["random"] * 2},
    ),
    Case(
        "tcp:// of one node",
        f"{EXAMPLE_DDP} meet.py tcp://localhost:@PORT",
        {"exit codes": [0], "stdout": ["hello sum=3"] * 2},
        campaign=True,
    ),
    Case(
        "tcp:// of two nodes",
        "--nnodes=2 --node-rank=@NODE --master-addr=localhost --master-port=@PORT "
        "meet.py tcp://localhost:@PORT",
        {"exit codes": [0, 0], "stdout": ["hello sum=3"] * 2},
        nodes=2,
    ),
    Case(
        "c10d by variables, as Kubeflow does",
        "PET_NNODES=1:2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=localhost:@PORT PET_RDZV_ID=job "
        "PET_RDZV_CONF=join_timeout=60 PET_MAX_RESTARTS=3 see.py",
        {"exit codes": [0, 0], "env GROUP_RANK": ["0", "1"], "env GROUP_WORLD_SIZE": ["2"] * 2},
        nodes=2,
    ),
    Case(
        "c10d alone, with what is of static",
        f"--nnodes=1:2 {MEET} --node-rank=7 --master-addr=10.0.0.9 --local-addr=127.0.0.2 "
        "--rdzv-conf=is_host=true,last_call_timeout=1,timeout=9,nonsense=1 see.py",
        {"env RANK": ["0"], "env MASTER_ADDR": ["127.0.0.2"], "env TORCHELASTIC_RUN_ID": ["job"]},
        says=(
            "node_rank is only used for static",
            "unknown key nonsense; known keys: join_timeout",
        ),
    ),
    Case(
        "too few nodes",
        f"--nnodes=2 {MEET} --rdzv-conf=join_timeout=3 see.py",
        {"workers": 0},
        {
            "exit codes": Differ(
                [1], [75], "trying again is sensible: the job itself has not failed"
            )
        },
        says=("RendezvousTimeoutError", "3 s passed with 1 of 2:2 nodes"),
    ),
    Case(
        "a second node of standalone",
        "--standalone --nnodes=2 --rdzv-conf=join_timeout=1 see.py",
        {"workers": 0},
        refused("nobody could ever join: it is told at once, not after the join timeout"),
    ),
    # -------------------------------------------------------------- lines as they are published
    Case(
        "torchrun's own: stacked",
        "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=1 --nproc-per-node=2 see.py",
        {"exit codes": [0], "env WORLD_SIZE": ["2"] * 2, "env TORCHELASTIC_RUN_ID": ["none"] * 2},
    ),
    Case(
        "torchrun's own: fault tolerant",
        "--nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-id=job --rdzv-backend=c10d "
        "--rdzv-endpoint=localhost:@PORT see.py",
        {"exit codes": [0, 0], "env WORLD_SIZE": ["4"] * 4},
        nodes=2,
    ),
    Case(
        "torchrun's own: elastic",
        "PET_RDZV_CONF=last_call_timeout=1 --nnodes=1:4 --nproc-per-node=2 --max-restarts=3 "
        "--rdzv-id=job --rdzv-backend=c10d --rdzv-endpoint=localhost:@PORT see.py",
        {"exit codes": [0], "env WORLD_SIZE": ["2"] * 2},
    ),
    Case(
        "torchrun's own: standalone",
        "--standalone --nnodes=1 --nproc-per-node=2 see.py",
        {"exit codes": [0], "env WORLD_SIZE": ["2"] * 2},
    ),
    Case(
        "torchrun's own: near a GPU",
        "CUDA_VISIBLE_DEVICES= --numa-binding=node --nproc-per-node=2 see.py",
        {},
        only(0, 2, 1, "without a GPU the workers are spread over the machine's nodes"),
        campaign=True,
    ),
    Case(
        "torch.distributed.launch's own: one node",
        "--nproc-per-node=2 see.py",
        {"worker's argv": [["see.py", f"--local-rank={rank}"] for rank in "01"]},
        launchers=LAUNCH,
    ),
    Case(
        "torch.distributed.launch's own: two nodes",
        "--nproc-per-node=2 --nnodes=2 --node-rank=@NODE --master-addr=127.0.0.1 "
        "--master-port=@PORT see.py",
        {"exit codes": [0, 0], "env RANK": ["0", "1", "2", "3"]},
        launchers=LAUNCH,
        nodes=2,
        campaign=True,
    ),
    Case(
        "examples: DDP and tensor parallelism",
        f"{EXAMPLE_DDP} train.py",
        {"exit codes": [1], "stdout": ["hello launched=True sum=3"] * 2},
        campaign=True,
    ),
    Case(
        "examples: one node, a number of workers",
        "--nnodes=1 --nproc_per_node=2 see.py",
        {"exit codes": [0], "env WORLD_SIZE": ["2"] * 2},
    ),
    Case(
        "examples: an endpoint, and only one rank's output",
        "--nproc_per_node=2 --rdzv_endpoint=localhost:@PORT --local-ranks-filter 0 --role rank "
        "--tee 3 see.py say=hello",
        {"exit codes": [0], "stdout": ["[rank0]:hello"]},
    ),
    Case(
        "examples: a module at a free port",
        "--nproc_per_node=2 --rdzv_backend c10d --rdzv_endpoint=localhost:0 "
        "--local-ranks-filter 0 --role rank --tee 3 -m see say=hello",
        {"exit codes": [0], "stdout": ["[rank0]:hello"]},
    ),
    Case(
        "examples: several machines by Slurm",
        "--nnodes 2 --nproc_per_node 1 --rdzv_id 2024 --rdzv_backend c10d "
        "--rdzv_endpoint 127.0.0.1:@PORT see.py 50 10",
        {"exit codes": [0, 0], "env TORCHELASTIC_RUN_ID": ["2024"] * 2},
        nodes=2,
    ),
    Case(
        "examples: several machines, each with its rank",
        "--nproc_per_node=2 --nnodes=2 --node_rank=@NODE --rdzv_id=456 --rdzv_backend=c10d "
        "--rdzv_endpoint=localhost:@PORT see.py 50 10",
        {"exit codes": [0, 0], "env WORLD_SIZE": ["4"] * 4},
        nodes=2,
    ),
    # -------------------------------------------------------------- output
    Case(
        "redirects by local rank",
        f"{TWO} --log-dir=logs -r 0:1,1:2 see.py say=hello",
        {"files": {"attempt_0/0/stdout.log": "hello\n", "attempt_0/1/stderr.log": "hello!\n"}},
        {
            "env TORCHELASTIC_ERROR_FILE": Differ(
                [f"relative LOGS/{rank}/error.json" for rank in "01"],
                [f"LOGS/{rank}/error.json" for rank in "01"],
                "it is found from whatever directory the worker has gone to",
            )
        },
    ),
    Case(
        "tee, filters and a role",
        f"{TWO} --log-dir=@HOME/logs --redirects=1 --tee=3 --local-ranks-filter=1 --role=trainer "
        "--duplicate-stdout-filters=hello,x,,y --duplicate-stderr-filters=nothing see.py say=hello",
        {"stdout": ["[trainer1]:hello"], "stderr": ["[trainer1]:hello!"]},
    ),
    Case(
        "prefix template",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${role_name}/${rank}/${local_rank}> ' "
        f"{TWO} -t 0:2,1:1 see.py say=hello",
        {"stdout": ["default/1/1> hello", "hello"], "stderr": ["default/0/0> hello!", "hello!"]},
    ),
    Case(
        "only some local ranks",
        f"{TWO} --local-ranks-filter=0 see.py say=hello",
        {"stdout": ["hello"], "worker's stdout": ["HOME/stdout", "/dev/null"]},
    ),
    Case(
        "no files",
        f"{TWO} --log-dir=/dev/null -t 3 --local-ranks-filter=0 "
        "see.py handle say=hello await=0 await=1 fail-as=1:4 wait",
        {
            "exit codes": [1],
            "stdout": ["hello", "hello"],
            "files": {},
            "env TORCHELASTIC_ERROR_FILE": ["", ""],
        },
    ),
    Case(
        "local ranks of two digits",
        f"{TWO} -r 11:3 see.py say=hello",
        {},
        only(0, 2, 1, "a node may have more than ten workers"),
    ),
    Case(
        "a quiet launcher",
        f"LOGLEVEL=ERROR OMP_NUM_THREADS=1 {TWO} see.py say=hello",
        {"stderr": ["hello!", "hello!"]},
        whole_stderr=True,
    ),
    Case(
        "torchrun's own settings",
        f"{TWO} --monitor-interval=0.5 --start-method=fork --event-log-handler=console see.py",
        {"exit codes": [0]},
        says=("torchelastic.worker.status.SUCCEEDED",) * 2,
    ),
    # -------------------------------------------------------------- what users add to it
    Case(
        "events of a failure after a restart",
        f"{ALONE} --max-restarts=1 --role=r --event-log-handler=console --no-python "
        f"@PYTHON see.py 'error={WITH_TRACEBACK}' exit=3",
        {"exit codes": [1], "workers": 2},
        says=('"raw_error": "{\\"message\\"',) * 2,
    ),
    Case(
        "events of a launcher that is ended",
        f"{ALONE} --event-log-handler=console --run-path see.py handle wait",
        {},
        {**ends(signal.SIGTERM), **RUN_PATH_ALONE},
        send=Send(signal.SIGTERM),
        says=("torchelastic.worker.status.FAILED",) * 2,
    ),
    Case(
        "an event handler of one's own",
        f"PYTHONPATH=@HOME/plugin {ALONE} --event-log-handler=mine see.py",
        {"exit codes": [0]},
        says=('mine {"name": "torchelastic.worker.status.SUCCEEDED"',) * 2,
    ),
    Case(
        "an event handler that nobody knows",
        f"{ALONE} --event-log-handler=mine see.py",
        {"workers": 0},
        USAGE,
        says=("KeyError: 'mine'", "torch knows no event handler 'mine' there, only console"),
    ),
    Case(
        "logs specs of one's own",
        f"PYTHONPATH=@HOME/plugin {TWO} --max-restarts=1 --log-dir=@HOME/logs --logs-specs=flat "
        "-r 0:3 -t 3 --local-ranks-filter=1 --duplicate-stdout-filters=hello "
        "see.py say=hello await=0 await=1 fail-before=1",
        {
            "exit codes": [0],
            "stdout": ["[default1]:hello"] * 2,
            "files": {
                f"attempt_{attempt}/{name}": text
                for attempt in range(2)
                for name, text in (
                    ("rank-0-of-2.out", "hello\n"),
                    ("rank-1-of-2.out", "hello\n"),
                    ("some.out", "[default1]:hello\n"),
                )
            },
        },
    ),
    Case(
        "torch's own logs specs",
        f"{TWO} --log-dir=@HOME/logs --logs-specs=default -r 0:3 -t 1:1 "
        "see.py say=hello await=0 await=1 fail-as=1:4",
        {"exit codes": [1], "stdout": ["[default1]:hello"]},
    ),
    # -------------------------------------------------------------- failures and restarts
    Case(
        "a worker that fails",
        f"{TWO} --log-dir=@HOME/logs see.py await=0 rank=1 exit=3",
        {"exit codes": [1], "workers": 2, "files": {}},
        says=("exitcode  : 3", "rank 1 (local_rank 1) on "),
    ),
    Case(
        "a worker that waits while another fails",
        f"{TWO} see.py handle await=0 await=1 fail-as=1:3 wait",
        {"exit codes": [1], "signals": ["SIGTERM"]},
    ),
    Case(
        "a worker that is killed",
        f"{ALONE} see.py kill=9",
        {"exit codes": [1]},
        says=("Signal 9 (SIGKILL) received", "signal 9 (SIGKILL)"),
    ),
    Case(
        "a worker that ends early",
        f"{TWO} see.py rank=1 await-end=0",
        {"exit codes": [0], "signals": [], "workers": 2},
    ),
    Case(
        "restarts",
        f"{TWO} --max-restarts=3 --log-dir=@HOME/logs -r 3 "
        "see.py say=hello await=0 await=1 fail-before=2",
        {
            "exit codes": [0],
            "env TORCHELASTIC_RESTART_COUNT": ["0", "0", "1", "1", "2", "2"],
            "files": {
                f"attempt_{attempt}/{rank}/{stream}.log": text
                for attempt in range(3)
                for rank in range(2)
                for stream, text in (("stdout", "hello\n"), ("stderr", "hello!\n"))
            },
        },
    ),
    Case(
        "no restart is left",
        f"{ALONE} --max-restarts=1 see.py exit=5",
        {"exit codes": [1], "env TORCHELASTIC_RESTART_COUNT": ["0", "1"]},
    ),
    Case(
        "an error file with a traceback",
        "TORCHELASTIC_ERROR_FILE=@HOME/error.json --standalone "
        f"--log-dir=@HOME/logs see.py 'error={WITH_TRACEBACK}' exit=3",
        {"files": {"attempt_0/0/error.json": "E: gone", "error.json": "E: gone (errorCode 3)"}},
        says=("the stack", "the stack"),
    ),
    Case(
        "an error file without a traceback",
        f"{ALONE} --log-dir=@HOME/logs see.py 'error={WITHOUT_TRACEBACK}' exit=3",
        {"files": {"attempt_0/0/error.json": "gone"}},
        says=("traceback : gone", "exit code 3\n  gone"),
    ),
    Case(
        "a training with torch",
        f"{TWO} --log-dir=@HOME/logs train.py",
        {
            "exit codes": [1],
            "stdout": ["hello launched=True sum=3"] * 2,
            "files": {"attempt_0/1/error.json": "RuntimeError: the data is gone"},
        },
        says=("RuntimeError: the data is gone", "RuntimeError: the data is gone"),
    ),
    # -------------------------------------------------------------- scripts as tutorials have them
    Case(
        "tutorial: one process",
        f"{ALONE} @EXAMPLES/train_single.py --epochs=2 --samples=256",
        {"exit codes": [0]},
        says_stdout="epoch 2 | step 16 | loss ",
        campaign=True,
    ),
    Case(
        "tutorial: processes of its own",
        # A script that starts its own processes serves its own store.
        f"{ALONE} --no-python env -u TORCHELASTIC_USE_AGENT_STORE @PYTHON "
        "@EXAMPLES/train_spawn.py --port=@PORT --epochs=2 --samples=256",
        {"exit codes": [0]},
        says_stdout="epoch 2 | step 8 | loss ",
        campaign=True,
    ),
    Case(
        "tutorial: one machine, snapshots",
        f"{TWO} @EXAMPLES/train_ddp.py --epochs=2 --samples=256 --snapshot=@HOME/snapshot.pt",
        {"exit codes": [0]},
        says_stdout="training finished: epoch 2 | step 8 | loss ",
    ),
    Case(
        "tutorial: two machines, static",
        "--nnodes=2 --node-rank=@NODE --master-addr=127.0.0.1 --master-port=@PORT "
        "@EXAMPLES/train_multinode.py 2 1 --snapshot=@HOME/snapshot.pt",
        {"exit codes": [0, 0]},
        nodes=2,
        says_stdout="epoch 2 | loss 0.1665 | 2 workers",
        campaign=True,
    ),
    Case(
        "tutorial: two machines, c10d",
        f"--nnodes=2 {MEET} @EXAMPLES/train_multinode.py 2 1 --snapshot=@HOME/snapshot.pt",
        {"exit codes": [0, 0]},
        nodes=2,
        says_stdout="epoch 2 | loss 0.1665 | 2 workers",
        campaign=True,
    ),
    Case(
        "tutorial: a small GPT",
        f"{TWO} @EXAMPLES/train_chargpt.py --epochs=2 --samples=64 --snapshot=@HOME/gpt.pt",
        {"exit codes": [0]},
        says_stdout="epoch 2 | step 4 | loss ",
        campaign=True,
    ),
    # -------------------------------------------------------------- signals to the launcher
    Case(
        "SIGTERM",
        f"{TWO} see.py handle wait",
        {"signals": ["SIGTERM", "SIGTERM"]},
        ends(signal.SIGTERM),
        send=Send(signal.SIGTERM, 2),
    ),
    Case(
        "SIGINT",
        f"{ALONE} see.py handle wait",
        {"signals": ["SIGINT"]},
        ends(signal.SIGINT),
        send=Send(signal.SIGINT),
    ),
    Case(
        "a signal of one's own choice",
        f"{ALONE} --signals-to-handle=SIGUSR1 see.py handle wait",
        {"signals": ["SIGUSR1"]},
        ends(signal.SIGUSR1),
        send=Send(signal.SIGUSR1),
    ),
    Case(
        "a signal that is not to be handled",
        f"{ALONE} --signals-to-handle=SIGUSR1 see.py handle wait",
        {"exit codes": [143], "signals": []},
        {"left": Differ(1, 0, "workers never outlive their launcher")},
        send=Send(signal.SIGTERM),
    ),
    Case(
        "SIGKILL",
        f"{ALONE} see.py handle wait",
        {"exit codes": [137], "signals": []},
        {"left": Differ(1, 0, "workers never outlive their launcher")},
        send=Send(signal.SIGKILL),
    ),
    Case(
        "workers that do not care",
        f"{ALONE} --shutdown-timeout=1 see.py deaf wait",
        {"signals": []},
        ends(signal.SIGTERM),
        send=Send(signal.SIGTERM),
    ),
    *(
        Case(
            f"{signum.name} before the first round",
            f"--nnodes=2 {MEET} see.py",
            {"exit codes": [128 + signum], "workers": 0},
            send=Send(signum, 0),
        )
        for signum in (signal.SIGTERM, signal.SIGINT)
    ),
    # -------------------------------------------------------------- what is refused
    Case("an unknown flag", "--no-such-flag see.py", {"exit codes": [2]}),
    Case("no script", ALONE, {"exit codes": [2]}),
    Case("a minimum above the maximum", "--nnodes=2:1 see.py", {"workers": 0}, USAGE),
    Case("module without python", "-m --no-python see.py", {"workers": 0}, USAGE),
    Case(
        "module by run path",
        f"{ALONE} -m --run-path see.py",
        {},
        only(1, 0, 2, "torchrun forgets -m without a word"),
    ),
    Case("settings without a value", f"{ALONE} --rdzv-conf=a see.py", {"workers": 0}, USAGE),
    Case(
        "etcd",
        "--rdzv-backend=etcd --rdzv-endpoint=localhost:@PORT see.py",
        {"workers": 0},
        USAGE,
        says=(
            "EtcdStubError",
            "--rdzv-id is missing; with --rdzv-backend=etcd all jobs share one etcd",
        ),
    ),
    Case(
        "logs specs that nobody has",
        f"{ALONE} --logs-specs=mine see.py",
        {"workers": 0},
        USAGE,
        says=("torchrun.logs_specs[mine]", "there is no entry point 'mine' in the group"),
    ),
    Case(
        "a signal that is none",
        f"{ALONE} --signals-to-handle=SIGNONE see.py",
        {},
        only(1, 0, 2, "a signal that would not be handled is better known before it comes"),
    ),
    Case(
        "no such script",
        f"{ALONE} --max-restarts=3 no-such.py",
        {"workers": 0},
        refused("it is looked for before anything starts, and no restart is spent on it"),
    ),
    Case(
        "no such program",
        f"{ALONE} --no-python ./no-such",
        {"workers": 0},
        USAGE,
    ),
    Case(
        "no such module",
        f"{ALONE} -m no_such",
        {"exit codes": [1], "workers": 0},
        {
            "files": Differ(
                {},
                {"attempt_0/0/error.json": "VENV/bin/python: No module named no_such"},
                "the text with which a script exits is its failure's message",
            )
        },
    ),
    Case("a log folder that is a file", f"{ALONE} --log-dir=see.py see.py", {"workers": 0}, USAGE),
]

if recording.TORCH.split(".") >= ["2", "14"]:
    CASES += [
        Case(
            "a prefix of teed lines",
            "PET_NODE_RANK=@NODE PET_MASTER_PORT=@PORT --nnodes 2 --nproc-per-node 2 --tee 3 "
            "--log-line-prefix-template '${hostname}:${rank}: ' see.py say=hello",
            {"exit codes": [0, 0], "workers": 4},
            nodes=2,
        ),
        Case("a completion script", "--print-completion=bash", {"exit codes": [1], "workers": 0}),
    ]


# ---------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Result:
    """What both launchers have shown for a case."""

    theirs: Shown
    ours: Shown


def run(case: Case, folder: Path, fork: Start) -> Result:
    """Run a case under rdzvrun, and under torchrun if what that shows is not recorded."""
    theirs = recording.of_torchrun(case)
    with contextlib.ExitStack() as stack:
        if theirs is None:
            running = stack.enter_context(under_torchrun(case, folder, fork))
        ours = stack.enter_context(under_rdzvrun(case, folder))
        if theirs is None:
            theirs = to_its_end(running, left_by(case).torchrun)
        return Result(theirs, to_its_end(ours, left_by(case).rdzvrun))


def run_torchrun(case: Case, folder: Path, fork: Start) -> Shown:
    with under_torchrun(case, folder, fork) as running:
        return recording.part_of(case, to_its_end(running, left_by(case).torchrun))


def left_by(case: Case) -> Differ:
    """Return the number of processes that each launcher leaves behind."""
    return case.differs.get("left", Differ(0, 0, ""))


def to_its_end(launcher: Launched, left: int) -> Shown:
    launcher.poke()
    seen = launcher.end()
    seen["left"] = launcher.remain(left)
    return Shown(seen, launcher.stderr)


@contextlib.contextmanager
def running_all(
    cases: Sequence[Case], run_one: Callable[[Case, Path, Start], Any], factory: TempPathFactory
) -> Iterator[Mapping[str, Future[Any]]]:
    """Run cases, two at a time: a launcher mostly waits for its workers."""
    pool = ThreadPoolExecutor(max_workers=2)
    with ready_launchers(factory.mktemp("ready")) as fork:
        try:
            yield {
                case.name: pool.submit(run_one, case, factory.mktemp(f"case_{number}"), fork)
                for number, case in enumerate(cases)
            }
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", name="results")
def _results(
    request: pytest.FixtureRequest, tmp_path_factory: TempPathFactory
) -> Iterator[Mapping[str, Future[Result]]]:
    """Run the selected cases."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    own = (item for item in items if item.module is request.module)
    asked = [item.callspec.params["case"] for item in own if "results" in item.fixturenames]
    with running_all(asked, run, tmp_path_factory) as results:
        yield results


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name.replace(" ", "_"),
            marks=[pytest.mark.campaign] if case.campaign else [],
        )
        for case in CASES
    ],
)
def test_it_is_as_under_torchrun(case: Case, results: Mapping[str, Future[Result]]) -> None:
    check(case, results[case.name].result())


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_torchrun_still_shows_what_is_recorded(
    pytestconfig: pytest.Config, tmp_path_factory: TempPathFactory
) -> None:
    cases = {case.name: case for case in CASES if not case.campaign}
    with running_all([*cases.values()], run_torchrun, tmp_path_factory) as results:
        shown = {name: result.result() for name, result in results.items()}
    if pytestconfig.getoption("--rewrite"):
        recording.write([(cases[name], one) for name, one in shown.items()])
    recorded = {name: recording.of_torchrun(case) for name, case in cases.items()}
    differ = [name for name in cases if shown[name] != recorded[name]]
    assert differ == [], "`make conformance-record` writes what torchrun shows"


def check(case: Case, found: Result) -> None:
    """Check that both launchers show the same, except for the differences that the case lists."""
    theirs, ours = found.theirs, found.ours
    told = f"torchrun:\n{theirs.stderr}\nrdzvrun:\n{ours.stderr}"
    assert differences(case, theirs.seen, ours.seen) == {}, told
    assert {key: ours.seen[key] for key in case.shows} == case.shows, told
    for seen in (theirs.seen, ours.seen):
        assert not case.says_stdout or any(
            line.startswith(case.says_stdout) for line in seen["stdout"]
        ), told
    for said, shown in zip(case.says or (), (theirs, ours), strict=case.says is not None):
        assert said in shown.stderr


def differences(case: Case, theirs: Seen, ours: Seen) -> dict[str, tuple[Any, Any]]:
    """Return the unexpected differences, and expected ones that are missing: torchrun's, ours."""
    found = {}
    keys = theirs.keys() & ours.keys() if "workers" in case.differs else theirs.keys() | ours.keys()
    if "workers" in case.differs:
        # If one of them runs no workers, their output does not matter either.
        keys -= {"stdout", "stderr", "files"}
    for key in keys - EVERYWHERE:
        seen = theirs.get(key), ours.get(key)
        meant = case.differs.get(key)
        if seen != (meant.torchrun, meant.rdzvrun) if meant else seen[0] != seen[1]:
            found[key] = seen
    return found


def test_every_difference_has_a_reason() -> None:
    assert all(differ.why for case in CASES for differ in case.differs.values())


def test_what_the_documentation_names_is_there() -> None:
    text = " ".join((ROOT / "docs" / "torchrun.md").read_text().split())
    section = text.partition("# rdzvrun in place of torchrun")[2]
    named = set(re.findall(r"(?<!\*)\*([A-Za-z][^*|]*)\*(?!\*)", section)) - {"like this"}
    assert named - {case.name for case in CASES} == set()
    files = [*(ROOT / "tests").rglob("test_*.py")]
    code = " ".join([*(path.read_text() for path in files), *(path.name for path in files)])
    tests = re.findall(r"`(test_[\w.]+\w)`", section)
    assert len(tests) > 5
    assert [name for name in tests if name not in code] == []


STAND_FOR = {
    "$NUM_NODES": "2",
    "$NUM_TRAINERS": "2",
    "NUM_GPUS_YOU_HAVE": "2",
    "--nproc-per-node=8": "--nproc-per-node=2",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "$JOB_ID": "job",
    "$HOST_NODE_ADDR": "localhost:@PORT",
    "192.168.1.1": "127.0.0.1",
    "--master-port=1234": "--master-port=@PORT",
    "--node-rank=0": "--node-rank=@NODE",
    "--node-rank=1": "--node-rank=@NODE",
}
"""Values in the cases for what torch's documentation leaves open."""


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "torch.distributed.launch"])
def test_every_line_of_torchs_own_documentation_is_in_the_table(launcher: str) -> None:
    text = importlib.import_module(launcher).__doc__ or ""
    program = r"(torchrun|python -m torch\.distributed\.launch)\s+(--(?:(?!\n\n).)+?)\s\S+\.py\b"
    shown = re.findall(rf"^ {{4}}{program}", text, re.MULTILINE | re.DOTALL)
    assert len(shown) >= {"torch.distributed.run": 5, "torch.distributed.launch": 3}[launcher]
    tried = {
        (case.launchers[0], *(word for word in shlex.split(case.line) if not VARIABLE.match(word)))
        for case in CASES
    }
    for name, line in shown:
        stands = re.compile("|".join(map(re.escape, STAND_FOR)))
        filled = stands.sub(lambda found: STAND_FOR[found[0]], line)
        words = (name, *shlex.split(filled), "see.py")
        assert any(case[: len(words)] == words for case in tried), " ".join(words)


def test_every_flag_of_torchrun_is_in_the_table() -> None:
    """In a line of a case, by its name or by its variable."""
    from torch.distributed.run import get_args_parser

    lines = " ".join(case.line for case in CASES).replace("_", "-")
    for action in get_args_parser()._actions:
        names = [name.replace("_", "-") for name in action.option_strings]
        if names and "--help" not in names:
            variable = f"PET-{action.dest.upper().replace('_', '-')}="
            assert any(f" {name}" in f" {lines}" for name in (*names, variable)), names


def test_every_abbreviation_that_torchrun_takes_means_the_same() -> None:
    from torch.distributed.run import get_args_parser

    from rdzv.launch_options import flags

    parser = flags.make_parser({}, legacy=False)
    # A flag that only newer versions of torchrun have is ours in any case: with each torch, one
    # abbreviation means the same.
    theirs = {
        name: act.dest
        for act in get_args_parser()._actions
        for name in act.option_strings
        if name not in parser.own
    }
    assert {name for name in parser.options if name.startswith("--")} - theirs.keys() == parser.own
    for name, dest in theirs.items():
        for length in range(len("--x"), len(name) + 1) if name.startswith("--") else ():
            short = name[:length]
            meant = {act for other, act in theirs.items() if other.startswith(short)}
            if short in theirs or len(meant) == 1:
                given, _ = parser.split([f"{short}=x"])
                assert given[0].actions[0].dest == dest, short
            else:
                with pytest.raises(InvalidRequestError, match="write one of them out"):
                    parser.split([short])
