"""Mutation testing: change the code at random places, and see whether a test notices.

`make mutants N=400 SEED=7` draws N changes (`operators.py`) to the files of `TARGETS`. It plants
each in a copy of the tree and runs the quick tests that execute its line, then the tests that
`TARGETS` names beside them, then all quick tests. A change that no test notices has survived, and
is printed. Either a test is missing, or nothing can be observed of the change: then
`equivalents.toml` says why.

The lines that each test executes are recorded once for a state of the tree, and verdicts are kept
as they are made, both below build/mutants: an interrupted run continues. As root, each test run has
a process namespace of its own and can write to its copy alone, since a changed program may kill or
remove anything.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from rdzv.structs import struct
from tests.mutants.operators import Mutation, mutations

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/mutants"
COPIED = (
    *("agent", "bench", "deploy", "docs", "examples", "proto", "rendezvous", "tests"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "GLOSSARY.md", "ARCHITECTURE.md", "Makefile"),
)
QUICK = ("tests/unit", "tests/scenarios", "tests/stores", "-m", "not slow")
SIM = "tests/sim/test_sim.py"
RUNNER = ("tests/integration/test_runner.py", "tests/integration/test_runner_outlives.py")
TARGETS: dict[str, tuple[str, ...]] = {
    "rendezvous/rdzv/core/*.py": (SIM, "tests/unit/core/test_small_scope.py"),
    "agent/rdzv/agent/core/*.py": (SIM,),
    "rendezvous/rdzv/server/sessions/driver.py": (SIM,),
    "rendezvous/rdzv/server/engine/jobs.py": (SIM,),
    "rendezvous/rdzv/server/scheduling/placer.py": (SIM,),
    "rendezvous/rdzv/server/engine/announcements.py": (SIM,),
    "rendezvous/rdzv/server/diagnosis/hang_investigation.py": (SIM,),
    "rendezvous/rdzv/server/scheduling/quarantined_nodes.py": (SIM,),
    "rendezvous/rdzv/server/diagnosis/log_relay.py": ("tests/integration/test_logs.py",),
    "rendezvous/rdzv/server/replication/replica.py": ("tests/integration/test_replicas.py",),
    "rendezvous/rdzv/stores/*.py": ("tests/integration/test_etcd.py",),
    "rendezvous/rdzv/transport/node_stream.py": (),
    "rendezvous/rdzv/torchrun/sync_stream.py": ("tests/integration/test_torchrun_handler.py",),
    "agent/rdzv/agent/job/job_driver.py": (SIM,),
    "agent/rdzv/agent/node/node.py": ("tests/integration/test_daemon.py",),
    "agent/rdzv/agent/runner/runner.py": (*RUNNER, "tests/integration/test_warm.py"),
    "agent/rdzv/agent/runner_link.py": (*RUNNER, "tests/integration/test_fencing.py"),
    "agent/rdzv/agent/server_link/link.py": (),
    "agent/rdzv/agent/runner/store_host.py": ("tests/integration/test_warm_store_host.py", *RUNNER),
    "agent/rdzv/agent/workers/worker_group.py": RUNNER,
    "agent/rdzv/agent/runner/zygote.py": ("tests/integration/test_warm.py",),
}
"""What is changed, and which tests outside of the quick ones run it, the nearest first."""
TEST_LIMIT_S = 120
"""For one test; a change that has a test wait so long is noticed."""
RUN_LIMIT_S = 900
MEMORY = 12 << 30
PYTEST = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}")
CAUGHT_SHARE = 0.9
"""What is asked of the tests."""


@struct(frozen=True)
class Verdict:
    """What became of one mutation."""

    mutation: Mutation
    by: str | None
    """The first test that failed; None: it has survived."""
    equivalent: str | None = None
    """Why nothing can be observed of it, if that is known."""


def main() -> int:
    """Draw, run, and report, as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=400, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=None, help="repeats a draw")
    parser.add_argument("--only", default="", help="files with this word in their path")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--near", action="store_true", help="only tests that execute the line")
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    drawn = draw(options.n, seed, options.only)
    state = _state_of_the_tree()
    print(f"seed {seed}, revision {_revision()}: {len(drawn)} mutants", flush=True)
    with contextlib.ExitStack() as stack:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(options.processes):
            copies.put(stack.enter_context(Copy.made()))
        lines = _lines(copies, state)
        kept = BUILD / f"verdicts-{state}{'-near' if options.near else ''}.jsonl"
        verdicts = _run_all(drawn, copies, lines, kept, options)
    return report(verdicts, f"seed {seed}, revision {_revision()}")


def targets() -> dict[str, tuple[str, ...]]:
    """Return the files that are changed, each with its further tests."""
    return {
        file.relative_to(ROOT).as_posix(): tests
        for pattern, tests in TARGETS.items()
        for file in sorted(ROOT.glob(pattern))
    }


def draw(count: int, seed: int, only: str = "") -> list[Mutation]:
    """Draw from all mutations of all targets; each is as likely as each other."""
    all_of_them = [
        mutation
        for file in targets()
        if only in file
        for mutation in mutations(file, (ROOT / file).read_text())
    ]
    return random.Random(seed).sample(all_of_them, min(count, len(all_of_them)))


# ---------------------------------------------------------------------- running


@struct(frozen=True)
class Copy:
    """A copy of the tree, with an interpreter of its own that imports from it."""

    root: Path

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Copy]:
        """Copy the tree, and remove it in the end."""
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="copy-", dir=BUILD) as name:
            root = Path(name)
            root.chmod(0o755)  # Tests of other accounts reach it.
            for each in COPIED:
                if (ROOT / each).is_dir():
                    skip = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / each, root / each, ignore=skip)
                else:
                    shutil.copy(ROOT / each, root)
            _make_environment(root)
            yield cls(root)

    def pytest(
        self, words: list[str], environ: Mapping[str, str] = {}, limit_s: float = RUN_LIMIT_S
    ) -> tuple[int, str]:
        """Run pytest in the copy; returns its exit status, and what it printed."""
        python = str(self.root / ".venv/bin/python")
        command = [python, "-m", "pytest", "-p", "tests.mutants.plugin"]
        with (self.root / "output").open("w+", errors="replace") as out:
            child = subprocess.Popen(
                [*_caged(self.root), *command, *words],
                cwd=self.root,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            out.seek(0)
            return status, out.read()


def _make_environment(root: Path) -> None:
    """Make a virtual environment that has this one's packages, and rdzv from the copy."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    for script in Path(sys.executable).parent.iterdir():
        made = root / ".venv/bin" / script.name
        if made.exists() or script.name.startswith("python") or not script.is_file():
            continue
        data = script.read_bytes()
        made.write_bytes(data.replace(f"#!{sys.prefix}/".encode(), f"#!{root}/.venv/".encode(), 1))
        made.chmod(0o755)
    packages = next((root / ".venv/lib").glob("python3*/site-packages"))
    places = [root / "agent", root / "proto", root / "rendezvous", sysconfig.get_path("purelib")]
    (packages / "rdzv.pth").write_text("".join(f"{place}\n" for place in places))


def _caged(root: Path) -> list[str]:
    """Return what starts a command in namespaces where it can write, and kill, next to nothing."""
    limits = ["prlimit", f"--as={MEMORY}"]
    if os.geteuid() != 0:
        return limits
    mounts = [f"mount --bind {root} {root}", "mount -o remount,bind,ro /"]
    if not root.is_relative_to("/tmp"):
        mounts.append("mount -t tmpfs tmpfs /tmp")
    return [
        *("unshare", "--fork", "--pid", "--mount", "--mount-proc", "--kill-child"),
        *("sh", "-c", " && ".join([*mounts, f'cd {root} && exec "$@"']), "sh", *limits),
    ]


def _lines(copies: SimpleQueue[Copy], state: str) -> dict[str, dict[str, list[str]]]:
    """Return which quick tests run which lines; recorded once for a state of the tree."""
    kept = BUILD / f"lines-{state}.json"
    if not kept.exists():
        print("recording which test runs which line ...", flush=True)
        copy = copies.get()
        copies.put(copy)
        began = time.monotonic()
        output = copy.root / "lines"
        words = [*QUICK, "-q", "-n", "2", "-p", "no:cacheprovider"]
        status, text = copy.pytest(words, {"MUTANTS_LINES": str(output)}, 1800)
        found: dict[str, dict[str, list[str]]] = {}
        for part in copy.root.glob("lines.*"):
            for file, lines in json.loads(part.read_text()).items():
                for line, tests in lines.items():
                    found.setdefault(file, {}).setdefault(line, []).extend(tests)
        if status not in (0, 1) or not found:
            raise SystemExit(f"the tests do not run in the copy:\n{text[-3000:]}")
        print(f"{text.splitlines()[-1]} {time.monotonic() - began:.0f} s", flush=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    result: dict[str, dict[str, list[str]]] = json.loads(kept.read_text())
    return result


def _run_all(
    drawn: list[Mutation],
    copies: SimpleQueue[Copy],
    lines: dict[str, dict[str, list[str]]],
    kept: Path,
    options: argparse.Namespace,
) -> list[Verdict]:
    known: dict[str, str | None] = {}
    if kept.exists():
        known = dict(json.loads(line) for line in kept.read_text().splitlines())
    equivalents = read_equivalents()

    def judge(mutation: Mutation) -> Verdict:
        source = (ROOT / mutation.file).read_text()
        why = equivalents.get((mutation.file, *_changed(mutation, source)))
        if why is not None:
            return Verdict(mutation, None, why)
        if _key(mutation) not in known:
            copy = copies.get()
            try:
                by = _caught_by(mutation, copy, lines.get(mutation.file, {}), options.near)
            finally:
                copies.put(copy)
            with kept.open("a") as file:
                file.write(json.dumps([_key(mutation), by]) + "\n")
            known[_key(mutation)] = by
        return Verdict(mutation, known[_key(mutation)])

    verdicts = []
    with ThreadPoolExecutor(options.processes) as pool:
        for verdict in pool.map(judge, drawn):
            verdicts.append(verdict)
            word = "equivalent" if verdict.equivalent else verdict.by or "SURVIVED"
            print(f"{len(verdicts):4}  {_place(verdict.mutation)}  {word}", flush=True)
    return verdicts


def _caught_by(
    mutation: Mutation, copy: Copy, lines: dict[str, list[str]], near: bool
) -> str | None:
    """Return the first test that fails because of a mutation; the nearest are run first."""
    # A line that no test runs by itself is run as its module is loaded.
    here = lines.get(str(mutation.line)) or [test for each in lines.values() for test in each]
    names = copy.root / "chosen"
    names.write_text("\n".join(sorted(set(here))))
    files = sorted({test.partition("::")[0] for test in here})
    stages = [files] if files else []
    if not near:
        stages += [[tests] for tests in targets()[mutation.file]] + [list(QUICK)]
    for tests in stages:
        chosen = {"MUTANTS_CHOSEN": str(names)} if tests is files else {}
        with _planted(mutation, copy):
            by = _first_failure(copy.pytest([*PYTEST, *tests], chosen))
        # Some start programs and wait for them: one may have failed by itself.
        again = [by] if by and by.startswith("tests/") else tests
        if by and not _first_failure(copy.pytest([*PYTEST, *again], chosen)):
            return by
    return None


@contextlib.contextmanager
def _planted(mutation: Mutation, copy: Copy) -> Iterator[None]:
    file = copy.root / mutation.file
    source = file.read_text()
    file.write_text(mutation.apply(source))
    try:
        yield
    finally:
        file.write_text(source)


def _first_failure(done: tuple[int, str]) -> str | None:
    status, text = done
    if status in (0, 5):
        return None
    for line in text.partition("= short test summary info =")[2].splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].split(maxsplit=1)[1]
    return "time limit" if status == -1 else f"pytest ended with {status}"


# ---------------------------------------------------------------------- reporting


def report(verdicts: list[Verdict], title: str) -> int:
    """Print the survivors and the share that was caught; returns the exit status."""
    for verdict in verdicts:
        if verdict.by is None and verdict.equivalent is None:
            mutation = verdict.mutation
            print(f"\nSURVIVED {_place(mutation)}")
            print("\n".join(mutation.diff((ROOT / mutation.file).read_text())))
    equivalent = sum(verdict.equivalent is not None for verdict in verdicts)
    judged = len(verdicts) - equivalent
    caught = sum(verdict.by is not None for verdict in verdicts)
    share = caught / judged if judged else 1.0
    print(
        f"\n{title}: {len(verdicts)} mutants, {equivalent} equivalent, {caught} of {judged} caught "
        f"({share:.1%}), {judged - caught} survived"
    )
    return 0 if share >= CAUGHT_SHARE else 1


def read_equivalents() -> dict[tuple[str, str, str], str]:
    """Return why mutations are equivalent, by file, line before and line after."""
    found = tomllib.loads((Path(__file__).parent / "equivalents.toml").read_text())
    return {
        (each["file"], each["before"], each["after"]): each["why"]
        for each in found.get("mutant", [])
    }


def _changed(mutation: Mutation, source: str) -> tuple[str, str]:
    """Return what a mutation takes out and puts in, line by line, without indentation."""
    diff = mutation.diff(source)
    return tuple("\n".join(line[2:].strip() for line in diff if line[0] == sign) for sign in "-+")  # type: ignore[return-value]


def _place(mutation: Mutation) -> str:
    return f"{mutation.file}:{mutation.line}: {mutation.what}"


def _key(mutation: Mutation) -> str:
    return f"{mutation.file}:{mutation.start}:{mutation.end}:{mutation.new}"


def _state_of_the_tree() -> str:
    """Return a digest of all sources and tests: lines and verdicts hold for one state alone."""
    digest = hashlib.sha256()
    for folder in ("proto", "rendezvous", "agent", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _revision() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "proto", "rendezvous", "agent")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (", changed" if changed else "")


if __name__ == "__main__":
    raise SystemExit(main())
