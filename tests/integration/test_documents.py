"""README, quick starts and task pages, as a reader runs them who has installed the wheels.

All command blocks of a page are one script, in order, in one shell. STORIES says what is changed in
it (hosts and ports, so that it fits on one machine), and what is left out, and why. A line that a
story names and the page no longer has is an error, as is a page with commands but no story.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from installed import build, clean_environ, environment_with_torch
from ports import free_port

pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
SITE = (ROOT / "mkdocs.yml").read_text()
ELSEWHERE = {
    **{"start/slurm.md": "deploy/slurm", "start/kubernetes.md": "deploy/kubernetes"},
    "README.md": ".",
}
BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```$|((?:^ {4,}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
SCRIPT = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"\$? ?(rdzv\w*(?!:)|sbatch|kubectl|pip|curl|torchrun|export|rm|url=|#!/bin/sh)\b"
)
CLOUD = "asks a cloud's own metadata service; its syntax is checked"
FRAGMENT = "... stands for the reader's own line"
WHEELS = "test_installed_release.py installs the wheels"
NO_KUBERNETES = "needs a cluster; test_deploy_kubernetes.py checks the manifests"

UP = """
up() { until rdzvctl --server=$1 list >> list.txt 2>&1; do sleep 0.2; done; }
known() { until rdzvctl nodes $1 >> list.txt 2>&1; do sleep 0.2; done; }
seated() { until rdzvctl status $1 2>> list.txt | grep -q " $2 seated"; do sleep 0.2; done; }
"""
SERVER = "rdzvd --listen=127.0.0.1:29400 --http=127.0.0.1:29480 --store=memory > rdzvd.txt 2>&1 &"
NODES = f"""{SERVER}
export RDZV_SERVER=127.0.0.1:29400
up $RDZV_SERVER
node() {{
  rdzvrun --rdzv-endpoint=$RDZV_SERVER --rdzv-id=night --node-id=$1 --nnodes=1:2 --max-restarts=3 \\
    --rdzv-conf=last_call_timeout=60 endless.py > $1.txt 2>&1
}}
node n1 &
node n2 &
seated night 2
"""
"""A server, and the job `night` on two nodes."""
AGENT = """
agent() {
  printf '%s\\n' 'server = "127.0.0.1:29400"' "node_id = \\"$1\\"" 'gpus = "none"' \\
    "account = \\"$(id -un)\\"" \\
    "state_dir = \\"$PWD/$1\\"" "runtime_dir = \\"$PWD/$1/run\\"" 'labels = {rack = "a1"}' > $1.toml
  rdzv-agent --config $1.toml > $1.txt 2>&1 &
}
"""
ENDLESS = "import time\nwhile True:\n    time.sleep(0.1)\n"


@dataclass
class Story:
    """How the commands of one page become a script that ends, on one machine."""

    before: str = ""
    after: str = ""
    changed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    """Beginnings of lines that are not run, each with the reason."""
    shows: tuple[str, ...] = ()
    """The output that the reader sees."""


STORIES = {
    "README.md": Story(
        changed=(
            (r"HEAD|0\.0\.0\.0", "127.0.0.1"),
            (
                r"^(rdzvd .* --insecure) .*$",
                r"\1 --store=memory > 1.txt 2>&1 &\nup 127.0.0.1:29400",
            ),
            # Two nodes, which need not wait for more, with a training that does not end.
            ("2:4", "1:2"),
            (
                r"^(rdzvrun .*)=8 (.*) train.py$",
                r"\1=1 \2 endless.py > a.txt 2>&1 &\n\1=1 \2 endless.py > b.txt 2>&1 &\n"
                r"export RDZV_SERVER=127.0.0.1:29400\nseated night 2",
            ),
            (r"^(rdzvctl .* --watch) .*$", r"timeout 3 \1 || test $? = 124"),
            (
                r"NODE --deadline 5m",
                r"$(rdzvctl status night | awk '/ seated /{print $2; exit}') --deadline 5s",
            ),
        ),
        left_out=(("pip install", WHEELS), ("rdzvctl demo", "test_installed_release.py runs it")),
        shows=("step 60", "night  running", "Round 0 is complete", "goodput", "is draining"),
    ),
    "start/one-machine.md": Story(
        left_out=(("pip install", WHEELS),), shows=("step 60", "SIGKILL", "RANK 1 is pid")
    ),
    "start/cluster.md": Story(
        before="export RDZV_SERVER=127.0.0.1:29400",
        changed=(
            (r"HEAD|0\.0\.0\.0", "127.0.0.1"),
            (r"^(rdzvd .* --insecure)$", r"\1 --store=memory > 1.txt 2>&1 &\nup 127.0.0.1:29400"),
            # The two machines of the page.
            (r"^(rdzvrun .*)$", r"\1 > a.txt 2>&1 &\n\1 > b.txt 2>&1 &\nseated first 2"),
        ),
        shows=("first  running", "first  succeeded", "Round 0 is complete"),
    ),
    "start/slurm.md": Story(
        left_out=tuple(
            (program, "test_slurm.py runs it, under a Slurm of its own")
            for program in (
                *("sbatch", "scancel", "scontrol", "rdzv-slurm-drain"),
                *("export RDZV_SERVER", "rdzvctl status slurm-JOB_ID"),
            )
        )
    ),
    "frameworks.md": Story(
        left_out=(
            ("rdzvrun", "test_frameworks.py runs the examples, on two nodes"),
            ("torchrun", "test_frameworks.py runs the examples, on two nodes"),
            ("export PET_RDZV_ID", "test_frameworks.py runs the examples, on two nodes"),
            ("accelerate", "test_frameworks.py runs the examples, on two nodes"),
        ),
    ),
    "start/kubernetes.md": Story(
        changed=(
            (
                r"^(rdzvctl certs init .*)$",
                # An admin's token in place of a service account's.
                r"\1\nrdzvd --listen=127.0.0.1:29400 --store=memory --tls-cert=tls/server.crt "
                r"--tls-key=tls/server.key --auth=required --init-admin-token=ops-token "
                r"> rdzvd.txt 2>&1 &",
            ),
            (r"^(export RDZV_SERVER.*)$", r"\1\nup $RDZV_SERVER"),
        ),
        left_out=(("kubectl", NO_KUBERNETES),),
        shows=("no jobs at localhost",),
    ),
    "jobs.md": Story(
        before=f"{SERVER}\nexport RDZV_SERVER=127.0.0.1:29400\nup $RDZV_SERVER",
        after="rdzvctl status night",
        shows=("night  queued", "needs 2 nodes with gpu=h100"),
    ),
    "workers-that-stay.md": Story(
        changed=((" --epochs 60 --step-seconds 0.05", ""),), shows=("training finished",)
    ),
    "warm.md": Story(
        changed=(("=8", "=2"), (r"train\.py", "train.py > log.txt; rm snapshot.pt; cat log.txt")),
        left_out=(("rdzvrun --warm=torch,transformers", FRAGMENT),),
        shows=("step 60",),
    ),
    "standby.md": Story(
        left_out=(("rdzvrun", FRAGMENT), ("$ rdzvctl", "test_standby_workers.py looks at it")),
    ),
    "hangs.md": Story(
        before=NODES,
        changed=((r"\bJOB\b", "night"),),
        left_out=(("rdzvrun --hang-timeout=600 ...", FRAGMENT),),
        shows=("an operator asked for them", "endless.py:3"),
    ),
    "ledger.md": Story(before=NODES, shows=("goodput", "Where the time went")),
    "web.md": Story(
        before=NODES,
        changed=((r"^(curl -N .*)$", r"timeout 3 \1 || test $? = 124"), ("rank=3", "rank=1")),
        shows=("2 nodes and 2 workers run round 0",),
    ),
    "drain.md": Story(
        before=f"{AGENT}{NODES}agent a1\nknown a1",
        changed=(("5m", "5s"), ("ssh .RDZV_NODE sudo /opt/upgrade", "echo upgrades $RDZV_NODE")),
        left_out=(("#!/bin/sh", CLOUD),),
        shows=("n2", "upgrades a1"),
    ),
    "c10d.md": Story(
        changed=(
            (r"10\.0\.0\.1", "127.0.0.1"),
            (r"127\.0\.0\.1:29401", "127.0.0.1:29480"),
            (r"^(rdzvd .*)$", r"\1 --store=memory > 1.txt 2>&1 &\nup 127.0.0.1:29480"),
            (r"\$SLURM_JOB_ID", "4711"),
            ("2:3 --nproc-per-node=8", "1 --nproc-per-node=2"),
        ),
        left_out=(
            ("pip install", WHEELS),
            ("torchrun --rdzv-backend=rdzv", "test_torchrun_plugin.py runs it, on several nodes"),
        ),
        shows=("4711",),
    ),
}


def tab(title: str) -> list[str]:
    """List the pages of one tab of the site."""
    (part,) = re.findall(rf"^  - {title}:\n((?:      .*\n)+)", SITE, re.MULTILINE)
    return re.findall(r"[\w/-]+\.md", part)


def text_of(page: str) -> str:
    folder = ELSEWHERE.get(page)
    return (ROOT / folder / "README.md" if folder else ROOT / "docs" / page).read_text()


def blocks(page: str) -> list[str]:
    """List the command blocks of a page; others show output, or a file."""
    found = [a or re.sub(r"^ {4}", "", b, flags=re.M) for a, b in BLOCK.findall(text_of(page))]
    return [block for block in found if COMMAND.match(block.replace("\\\n", ""))]


def script_of(page: str) -> str:
    """Make one script of the command blocks of a page, as its story says."""
    story, lines = STORIES[page], []
    unused = [beginning for beginning, _ in story.left_out]
    unchanged = [pattern for pattern, _ in story.changed]
    for block in blocks(page):
        joined = re.sub(r" *\\\n *", " ", block).splitlines()
        # A block with prompts shows the output, too.
        prompts = [line for line in joined if line.startswith("$ ")]
        for line in [block] if block.startswith("#!") else prompts or joined:
            if reason := next((r for b, r in story.left_out if line.startswith(b)), None):
                unused = [one for one in unused if not line.startswith(one)]
                if reason == CLOUD:
                    subprocess.run(["sh", "-n"], input=line, text=True, check=True)
                continue
            changed = line.removeprefix("$ ")
            for pattern, replacement in story.changed:
                changed, count = re.subn(pattern, replacement, changed)
                if count and pattern in unchanged:
                    unchanged.remove(pattern)
            lines.append(changed)
    assert not unused and not unchanged, f"{page} has no such line any more: {unused + unchanged}"
    script = "\n".join([UP, story.before, *lines, story.after])
    for port in ("29400", "29480", "29411"):
        script = script.replace(port, str(free_port()))
    return script


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheels of this tree beside torch; return the folder of their programs."""
    pytest.importorskip("hatchling", reason="hatchling is not installed; run: make setup")
    files = tmp_path_factory.mktemp("files")
    wheel = build(files / "dist")
    (library,) = (files / "dist").glob("rdzv_worker-*.whl")
    return environment_with_torch(files / "env", wheel, library).parent


def run(folder: Path, page: str, programs: Path) -> str:
    """Run the commands of a page in a folder that has the scripts of the quick start."""
    for name, text in SCRIPT.findall(text_of("start/one-machine.md")):
        (folder / name).write_text(text)
    (folder / "endless.py").write_text(ENDLESS)
    shutil.copytree(ROOT / "examples", folder / "examples")
    # torchrun is torch's own, and needs nothing of rdzv.
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    output = folder / "said"
    # Into a file: processes that the page leaves running would keep a pipe open.
    with output.open("wb") as file:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script_of(page)],
            cwd=folder,
            env={**clean_environ(), "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = shell.wait(timeout=270)
        except subprocess.TimeoutExpired:
            exit_code = 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
            shell.wait(60)
    said = output.read_text()
    written = "\n".join(f"== {p.name}\n{p.read_text()[-2000:]}" for p in folder.glob("*.txt"))
    assert exit_code == 0, f"exit code {exit_code}\n{said}\n{written}"
    return said


def test_every_page_with_commands_has_a_story() -> None:
    pages = {page for title in ("Start", "Tasks") for page in tab(title) if blocks(page)}
    assert {*pages, "README.md"} == set(STORIES)


@pytest.mark.parametrize("page", STORIES)
def test_the_commands_of_a_page_work_as_they_stand(
    page: str, programs: Path, tmp_path: Path
) -> None:
    said = run(tmp_path, page, programs)
    for text in STORIES[page].shows:
        assert text in said, said
