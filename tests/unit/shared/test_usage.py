"""The daemons refuse a wrong command line in one line, like everything else that is wrong."""

from __future__ import annotations

import click
import pytest

from rdzv.runtime.usage import Choice, DaemonCommand


@click.command("rdzv-test", cls=DaemonCommand)
@click.option("-l", "--log-level", type=Choice(["debug", "info"]))
@click.option("--count", type=int)
def program(log_level: str | None, count: int | None) -> None:
    """Do nothing."""
    if count == 0:
        raise click.Abort


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--log-levle=info"], "--log-levle is not an option; did you mean `--log-level`?"),
        (["--zzz"], "--zzz is not an option; see rdzv-test --help"),
        (["-l", "inof"], "--log-level=inof is not one of debug, info; did you mean `info`?"),
        (["--count=x"], "--count: 'x' is not a number; see rdzv-test --help"),
        (["x"], "Got unexpected extra argument (x); see rdzv-test --help"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        program.main(arguments, prog_name="rdzv-test")
    assert end.value.code == 2
    assert capsys.readouterr().err == f"rdzv-test: {text}\n"


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--help"], 0), (["--count=0"], 130)])
def test_other_ends(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as end:
        program.main(arguments, prog_name="rdzv-test")
    assert end.value.code == code
