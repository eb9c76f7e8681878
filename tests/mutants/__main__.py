"""Mutation testing: change the code at random places, and see whether a test notices.

`make mutants N=400 SEED=7` draws N changes (`operators.py`) to the files of `TARGETS`. It plants
each in a copy of the tree and runs the tests of `JUDGES` that execute its line, the nearest and
quickest first. A change that no test notices has survived, and is printed. Either a test is
missing, or the change has no observable effect: then `equivalents.toml` says why.

The lines that each test executes, itself or in a program that it starts, are recorded once for a
state of the tree (`record.py`). Verdicts are stored as they are reached, both below build/mutants,
so an interrupted run continues. As root, each test run has its own process namespace and can write
only to its copy, because a changed program may kill or remove anything.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
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
from tests.mutants.record import QUICK_S, Record, file_of, make_programs_write

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/mutants"
SOURCES = ("agent", "proto", "rendezvous", "worker")
COPIED = (
    *(*SOURCES, "bench", "deploy", "docs", "examples", "tests"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "GLOSSARY.md", "ARCHITECTURE.md", "Makefile"),
    *("LICENSE", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml"),
)
TARGETS = (
    "rendezvous/rdzv/core/**/*.py",
    "agent/rdzv/agent/core/*.py",
    "rendezvous/rdzv/server/driver.py",
    "rendezvous/rdzv/server/sessions/*.py",
    "rendezvous/rdzv/server/operations/*.py",
    "rendezvous/rdzv/server/engine/*.py",
    "rendezvous/rdzv/server/scheduling/*.py",
    "rendezvous/rdzv/server/diagnosis/reported_hangs.py",
    "rendezvous/rdzv/server/diagnosis/worker_logs.py",
    "rendezvous/rdzv/server/diagnosis/snapshot_*.py",
    "rendezvous/rdzv/server/replication/replica.py",
    "rendezvous/rdzv/server/telemetry/notifications.py",
    "rendezvous/rdzv/server/wire.py",
    "rendezvous/rdzv/stores/*.py",
    "rendezvous/rdzv/view/advice.py",
    "rendezvous/rdzv/view/ledger.py",
    "rendezvous/rdzv/ctl/doctor.py",
    "rendezvous/rdzv/transport/node_stream.py",
    "rendezvous/rdzv/torchrun/sync_stream.py",
    "agent/rdzv/agent/exit_causes/*.py",
    "agent/rdzv/agent/job/job_driver.py",
    "agent/rdzv/agent/job/round.py",
    "agent/rdzv/agent/job/snapshot*.py",
    "worker/rdzv/worker/copy_snapshots.py",
    "agent/rdzv/agent/node/node.py",
    "agent/rdzv/agent/runner/**/*.py",
    "agent/rdzv/agent/runner_link/*.py",
    "agent/rdzv/agent/server_link/inbox.py",
    "agent/rdzv/agent/server_link/link.py",
    "agent/rdzv/agent/server_link/outbox.py",
    "agent/rdzv/agent/server_link/next_server.py",
    "agent/rdzv/agent/job_programs/store_host.py",
    "agent/rdzv/agent/workers/worker_group.py",
    "agent/rdzv/agent/job_programs/zygote.py",
    "worker/rdzv/worker/*.py",
)
"""The files that are changed."""
QUICK_JUDGES = ("tests/unit", "tests/scenarios", "tests/stores")
JUDGES = (
    *QUICK_JUDGES,
    "tests/sim/test_sim.py",
    "tests/integration/test_adoption.py",
    "tests/integration/test_agent_restart.py",
    "tests/integration/test_daemon.py",
    "tests/integration/test_etcd.py",
    "tests/integration/test_ended_by_the_machine.py",
    "tests/integration/test_fencing.py",
    "tests/integration/test_kept_shards_in_process.py",
    "tests/integration/test_kept_workers.py",
    "tests/integration/test_ledger_of_a_job.py",
    "tests/integration/test_logs.py",
    "tests/integration/test_parking.py",
    "tests/integration/test_replicas.py",
    "tests/integration/test_resumed_from_memory.py",
    "tests/integration/test_runner.py",
    "tests/integration/test_runner_faults.py",
    "tests/integration/test_runner_hung_files.py",
    "tests/integration/test_runner_outlives.py",
    "tests/integration/test_snapshot_slots.py",
    "tests/integration/test_torchrun_handler.py",
    "tests/integration/test_warm.py",
    "tests/integration/test_warm_restarts.py",
    "tests/integration/test_warm_store_host.py",
    "tests/integration/test_worker_in_process.py",
)
"""The tests that may notice: the quick ones, the simulator's, and those that run the rest."""
CHOICE = ("-m", "not campaign and not clusters")
LIMIT_S, LIMIT_FACTOR = 15.0, 5.0
"""The time limit of a test: this much, plus this many times its earlier duration."""
RUN_LIMIT_S = 900
ABREAST = 4
"""How many slow tests run side by side."""
MEMORY = 12 << 30
PYTEST = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", *CHOICE)
CAUGHT_SHARE = 0.9
"""The required share of caught mutants."""


@struct(frozen=True)
class Verdict:
    """The result of one mutation."""

    mutation: Mutation
    by: str | None
    """The first test that failed; None if it survived."""
    equivalent: str | None = None
    """Why it has no observable effect, if that is known."""


def main() -> int:
    """Draw, run, and report, according to the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=400, help="how many to draw")
    parser.add_argument("--seed", type=int, default=None, help="repeats a draw")
    parser.add_argument(
        "--only", default="", help="only files with one of these words in their path"
    )
    parser.add_argument("--quick", action="store_true", help="judge by `make unit` only")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    drawn = draw(options.n, seed, options.only)
    judges = ("-m", "quick or not slow", *QUICK_JUDGES) if options.quick else (*CHOICE, *JUDGES)
    state = _state_of_the_tree(judges)
    print(f"seed {seed}, revision {_revision()}: {len(drawn)} mutants", flush=True)
    with contextlib.ExitStack() as stack:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(options.processes):
            copies.put(stack.enter_context(Copy.made()))
        verdicts = _run_all(
            drawn, copies, make_record(state, judges), BUILD / f"verdicts-{state}.jsonl"
        )
    return report(verdicts, f"seed {seed}, revision {_revision()}")


def targets() -> list[str]:
    """Return the files that may be changed."""
    return [
        file.relative_to(ROOT).as_posix()
        for pattern in TARGETS
        for file in sorted(ROOT.glob(pattern))
    ]


def draw(count: int, seed: int, only: str = "") -> list[Mutation]:
    """Draw from all mutations of all targets, with equal probability.

    `only` has comma-separated words: only targets with one of them in their path are used.
    """
    all_of_them = [
        mutation
        for file in targets()
        if any(word in file for word in only.split(","))
        for mutation in mutations(file, (ROOT / file).read_text())
    ]
    return random.Random(seed).sample(all_of_them, min(count, len(all_of_them)))


# ---------------------------------------------------------------------- running


@struct(frozen=True)
class Copy:
    """A copy of the tree, with its own interpreter that imports from it."""

    root: Path

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[Copy]:
        """Copy the tree, and remove the copy at the end."""
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="copy-", dir=BUILD) as name:
            root = Path(name)
            root.chmod(0o755)  # Tests of other accounts need access.
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
        """Run pytest in the copy; return its exit status and output."""
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
    """Create a virtual environment with this one's packages, and rdzv from the copy."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    for script in Path(sys.executable).parent.iterdir():
        made = root / ".venv/bin" / script.name
        if made.exists() or script.name.startswith("python") or not script.is_file():
            continue
        data = script.read_bytes()
        made.write_bytes(data.replace(f"#!{sys.prefix}/".encode(), f"#!{root}/.venv/".encode(), 1))
        made.chmod(0o755)
    packages = next((root / ".venv/lib").glob("python3*/site-packages"))
    places = [*(root / each for each in SOURCES), sysconfig.get_path("purelib")]
    (packages / "rdzv.pth").write_text("".join(f"{place}\n" for place in places))


def _caged(root: Path) -> list[str]:
    """Return a prefix that runs a command in namespaces where it can harm next to nothing."""
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


def make_record(state: str, judges: tuple[str, ...]) -> Record:
    """Return which tests run which lines, recorded once for a state of the tree."""
    kept = BUILD / f"lines-{state}.json"
    if kept.exists():
        return Record.read(kept)
    print("recording which test runs which line ...", flush=True)
    began = time.monotonic()
    with Copy.made() as copy:
        make_programs_write(copy.root, targets())
        words = [*judges, "-q", "-n", "2", "-p", "no:cacheprovider", "--dist", "loadfile"]
        status, text = copy.pytest(words, {"MUTANTS_LINES": str(copy.root / "lines")}, 3600)
        record = Record.collected(copy.root)
        # Without pytest Python exits with 1, as pytest does where a test fails.
        if status not in (0, 1) or not record.seconds:
            raise SystemExit(f"the tests do not run in the copy:\n{text[-3000:]}")
    print(f"{text.splitlines()[-1]} {time.monotonic() - began:.0f} s", flush=True)
    record.write(kept)
    return record


def _run_all(
    drawn: list[Mutation],
    copies: SimpleQueue[Copy],
    record: Record,
    kept: Path,
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
                by = _caught_by(mutation, copy, record)
            finally:
                copies.put(copy)
            with kept.open("a") as file:
                file.write(json.dumps([_key(mutation), by]) + "\n")
            known[_key(mutation)] = by
        return Verdict(mutation, known[_key(mutation)])

    verdicts = []
    with ThreadPoolExecutor(copies.qsize()) as pool:
        for verdict in pool.map(judge, drawn):
            verdicts.append(verdict)
            word = "equivalent" if verdict.equivalent else verdict.by or "SURVIVED"
            print(f"{len(verdicts):4}  {_place(verdict.mutation)}  {word}", flush=True)
    return verdicts


def _caught_by(mutation: Mutation, copy: Copy, record: Record) -> str | None:
    """Return the first test that fails because of a mutation; the nearest run first."""
    tests = record.tests(mutation.file, (ROOT / mutation.file).read_text(), mutation.line)
    for portion in record.portions(tests):
        left = portion
        while left and (by := _first_failure_of(left, copy, record, mutation)):
            if by in left and _fails_by(by, copy, record, mutation):
                return by
            if by not in left:  # A module cannot be imported, or the time is up.
                if not _first_failure_of(left, copy, record, None):
                    return by
                break
            left = [test for test in left if test != by]
    return None


def _fails_by(test: str, copy: Copy, record: Record, mutation: Mutation) -> bool:
    """Return whether a test fails because of a mutation.

    Some tests start programs and wait for them; on a busy machine such a test may have failed by
    itself, so it is run again.
    """
    if record.seconds[test] > QUICK_S and not _first_failure_of([test], copy, record, mutation):
        return False
    return not _first_failure_of([test], copy, record, None)


def _first_failure_of(
    tests: list[str], copy: Copy, record: Record, mutation: Mutation | None
) -> str:
    """Run tests in a copy, with or without a mutation; return the first that fails, or nothing."""
    limits = {test: LIMIT_S + LIMIT_FACTOR * record.seconds[test] for test in tests}
    (copy.root / "chosen").write_text(json.dumps(limits))
    words = [*PYTEST, *_abreast(tests, record), *dict.fromkeys(map(file_of, tests))]
    with _planted(mutation, copy) if mutation is not None else contextlib.nullcontext():
        done = copy.pytest(words, {"MUTANTS_CHOSEN": str(copy.root / "chosen")})
    return _first_failure(done) or ""


def _abreast(tests: list[str], record: Record) -> tuple[str, ...]:
    """Return the options for running slow tests, which mostly wait, side by side."""
    slow = any(record.seconds[test] > QUICK_S for test in tests)
    return ("-n", str(min(len(tests), ABREAST))) if slow and len(tests) > 1 else ()


@contextlib.contextmanager
def _planted(mutation: Mutation, copy: Copy) -> Iterator[None]:
    file = copy.root / mutation.file
    source = file.read_text()

    def write(text: str) -> None:
        file.write_text(text)
        # Byte code is reused for a source of the same size and second.
        os.utime(file, (next(_seconds),) * 2)

    write(mutation.apply(source))
    try:
        yield
    finally:
        write(source)


_seconds = itertools.count(1_000_000_000)


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
    """Print the survivors and the share that was caught; return the exit status."""
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
    """Return what a mutation removes and inserts, line by line, without indentation."""
    diff = mutation.diff(source)
    return tuple("\n".join(line[2:].strip() for line in diff if line[0] == sign) for sign in "-+")  # type: ignore[return-value]


def _place(mutation: Mutation) -> str:
    return f"{mutation.file}:{mutation.line}: {mutation.what}"


def _key(mutation: Mutation) -> str:
    return f"{mutation.file}:{mutation.start}:{mutation.end}:{mutation.new}"


def _state_of_the_tree(judges: tuple[str, ...]) -> str:
    """Return a digest of all sources and tests: lines and verdicts are valid only for one state."""
    digest = hashlib.sha256("".join(judges).encode())
    for folder in (*SOURCES, "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _revision() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *SOURCES)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (", changed" if changed else "")


if __name__ == "__main__":
    raise SystemExit(main())
