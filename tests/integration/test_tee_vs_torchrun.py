"""Worker output is the same as under the real torchrun, on the console and in the files."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rdzv.agent.launch.launch import Output
from rdzv.agent.output.console_tee import (
    OutputStream,
    Tee,
    line_prefix,
    parse_filters,
    parse_ranks,
)
from rdzv.agent.output.run_files import RoundOutput, usual_output

pytest.importorskip("torch", reason="torch is not installed")

SCRIPT = r"""
import os
out = b"plain\n" + b"long " + b"x" * 9000 + b" orange\n" + b" 10%\r 20%\r\n\n \r\r\nnul\0\n"
out += b"feeds \x0c \x0b \x1c \xc2\x85 \xe2\x80\xa8 utf-8 \xf0\x9f\x8d\x8e\n"
out += b"red apple\rpear\nx,y\nx\nAPPLE\n"
os.write(1, out)  # At once: torchrun tears lines where it catches them half written.
os.write(2, b"warning: pear\nERROR: apple\nno ranks are told: $RANK\n")
"""
NPROC = 2
TEMPLATE = "${role_name}|${rank}|${local_rank}|${unknown} $"


@dataclass(frozen=True)
class Case:
    """The options of torchrun and of rdzvrun."""

    redirects: int = 0
    tee: int = 0
    ranks: str = ""
    out_filters: str = ""
    err_filters: str = ""
    template: str | None = None
    role: str = "default"

    def options(self) -> list[str]:
        given = {
            "--redirects": str(self.redirects),
            "--tee": str(self.tee),
            "--local-ranks-filter": self.ranks,
            "--duplicate-stdout-filters": self.out_filters,
            "--duplicate-stderr-filters": self.err_filters,
            "--role": self.role,
        }
        return [f"{option}={value}" for option, value in given.items() if value]


@dataclass
class Result:
    """The output: on the consoles, of each worker in order, and the files."""

    out: list[bytes]
    err: list[bytes]
    files: dict[str, list[bytes]]


CASES = {
    "tee": Case(tee=3, out_filters="apple,x,,y,orange", err_filters="ERROR,x"),
    "redirects": Case(redirects=3, ranks="0", out_filters="apple"),
    "template": Case(tee=1, redirects=2, template=TEMPLATE, role="trainer", out_filters="pear,"),
    "one rank": Case(tee=1, ranks="1", out_filters="apple"),
}


# ---------------------------------------------------------------------- torchrun


@pytest.fixture(scope="module")
def torchruns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Result]]:
    """Run them all at once: most of their time is `import torch`."""
    folder = tmp_path_factory.mktemp("torchrun")
    running = {name: start_torchrun(case, folder / name) for name, case in CASES.items()}
    yield {name: finish_torchrun(process, folder / name) for name, process in running.items()}


def start_torchrun(case: Case, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={NPROC}", f"--log-dir={folder}", *case.options()]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    # Each prints something about itself, unless it is told not to.
    env |= {"OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR", "PYTHONIOENCODING": "utf-8"}
    if case.template is not None:
        env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = case.template
    return subprocess.Popen(
        [*command, str(write_script(folder))],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish_torchrun(process: subprocess.Popen[bytes], folder: Path) -> Result:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    (attempt,) = folder.glob("*/attempt_0")
    return Result(by_worker(out), by_worker(err), files_in(attempt))


def write_script(folder: Path) -> Path:
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


# ---------------------------------------------------------------------- ours


async def follow_workers(case: Case, folder: Path) -> Result:
    """Do what an agent does for a round of this case, with files as consoles."""
    script, round_dir = write_script(folder), folder / "round_0"
    consoles = folder / "out", folder / "err"
    out, err = (os.open(path, os.O_WRONLY | os.O_CREAT) for path in consoles)
    for rank in range(NPROC):
        (round_dir / str(rank)).mkdir(parents=True)
    tee = Tee(out, err)
    for stream, text in (
        (OutputStream.OUT, case.out_filters),
        (OutputStream.ERR, case.err_filters),
    ):
        if text:
            tee.duplicate(stream, routes(case, round_dir).filtered[stream], parse_filters(text))
    workers = [start_worker(case, tee, script, round_dir, rank, (out, err)) for rank in (0, 1)]
    for worker in workers:
        assert await asyncio.to_thread(worker.wait, 60) == 0
    assert await tee.drain(60)
    tee.close()
    os.close(out)
    os.close(err)
    shown = [by_worker(path.read_bytes()) for path in consoles]
    return Result(shown[0], shown[1], files_in(round_dir))


def start_worker(
    case: Case, tee: Tee, script: Path, round_dir: Path, rank: int, consoles: tuple[int, int]
) -> subprocess.Popen[bytes]:
    prefix = line_prefix(case.template, case.role, rank, rank)
    routed = routes(case, round_dir).workers[rank]
    outputs = []
    for stream, file, console in zip(
        OutputStream, (routed.stdout, routed.stderr), consoles, strict=True
    ):
        if stream in routed.teed:
            tee.follow(routed.teed[stream], prefix, stream)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        outputs.append(os.open(file, flags) if file else os.dup(console))
    try:
        return subprocess.Popen([sys.executable, str(script)], stdout=outputs[0], stderr=outputs[1])
    finally:
        for fd in outputs:
            os.close(fd)


def routes(case: Case, round_dir: Path) -> RoundOutput:
    every, ranks = range(NPROC), parse_ranks(case.ranks)
    redirects, tee = dict.fromkeys(every, case.redirects), dict.fromkeys(every, case.tee)
    output = Output(redirects=redirects, tee=tee, shown_ranks=ranks)
    return usual_output(round_dir, output, NPROC)


# ---------------------------------------------------------------------- to compare


def by_worker(text: bytes) -> list[bytes]:
    """Return the lines in an order that does not depend on timing: by prefix, stably."""
    lines = text.split(b"\n")
    return sorted(lines, key=lambda line: re.split(rb"[:$]", line)[0] if prefixed(line) else b"")


def prefixed(line: bytes) -> bool:
    return line.startswith((b"[default", b"trainer|"))


def files_in(folder: Path) -> dict[str, list[bytes]]:
    return {
        str(path.relative_to(folder)): by_worker(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", CASES)
async def test_output_is_that_of_torchrun(
    name: str, torchruns: dict[str, Result], tmp_path: Path
) -> None:
    theirs = torchruns[name]
    ours = await follow_workers(CASES[name], tmp_path / "ours")
    assert ours.out == theirs.out
    assert ours.err == theirs.err
    assert ours.files == theirs.files


def test_the_cases_have_something_to_compare(torchruns: dict[str, Result]) -> None:
    tee = torchruns["tee"]
    assert b"[default1]:red apple" in tee.out
    assert b"[default0]:ERROR: apple" in tee.err
    assert len(tee.files["filtered_stdout.log"]) == 1 + NPROC * 3
    assert torchruns["redirects"].out == [b""]
    assert torchruns["redirects"].files["filtered_stdout.log"] == [b""]
    assert b"trainer|1|1|${unknown} $plain" in torchruns["template"].out
    assert not any(line.startswith(b"[default0]") for line in torchruns["one rank"].out)
    assert "0/stdout.log" in torchruns["one rank"].files


# ---------------------------------------------------------------------- a lot of it

FLOOD = r"""
import asyncio, os, resource, sys
from pathlib import Path
from rdzv.agent.output.console_tee import OutputStream, Tee

async def main():
    tee = Tee(1, 2)
    path = Path(sys.argv[1])
    tee.follow(path, b"[default0]:", OutputStream.OUT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = b"x" * 79 + b"\n"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; sys.stdout.write('x' * 79 + '\\n')\n"
        "for _ in range(1250): sys.stdout.write(('x' * 79 + '\\n') * 1000)",
        stdout=os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    await process.wait()
    assert await tee.drain(60)
    tee.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(after - before, file=sys.stderr)

asyncio.run(main())
"""


def test_a_hundred_megabytes_take_no_memory(tmp_path: Path) -> None:
    flood = [sys.executable, "-c", FLOOD, str(tmp_path / "log")]
    with subprocess.Popen(flood, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        size = 0
        while chunk := process.stdout.read(1 << 16):
            size += len(chunk)
        grown_kib = int(process.stderr.read())
    assert size == 1_250_001 * len(b"[default0]:" + b"x" * 79 + b"\n")
    assert grown_kib < 16_384
