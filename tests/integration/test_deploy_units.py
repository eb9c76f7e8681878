"""The package's units and configuration, as parsed by systemd and by our own programs."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cluster import BIN

from rdzv.agent.app.agent_settings import AgentSettings
from rdzv.server.settings.configuration import check
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.setting_types import Table
from rdzv.settings.toml_files import load

DEPLOY = Path(__file__).parents[2] / "deploy"
SYSTEMD = DEPLOY / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="there is no systemd-analyze here (Debian: systemd)",
)


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """Copy the units, with the programs of this checkout in place of the package's."""
    copies = []
    for unit in UNITS:
        copy = tmp_path / unit.name
        text = unit.read_text().replace("=/usr/bin/rdzv", f"={BIN}/rdzv")
        copy.write_text(text.replace("=+/usr/lib/rdzv/", f"=+{SYSTEMD}/"))
        copies.append(copy)
    return copies


def analyze(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *args], capture_output=True, text=True, timeout=60, check=False
    )


def settings(unit: Path) -> dict[str, list[str]]:
    """Read a unit's [Service], where a key may occur several times."""
    found: dict[str, list[str]] = {}
    _, _, text = unit.read_text().partition("[Service]\n")
    for line in text.partition("\n[")[0].splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_there_are_units_for_both_daemons() -> None:
    assert [unit.name for unit in UNITS] == ["rdzv-agent.service", "rdzvd.service"]


def test_systemd_finds_nothing_to_say_about_them(units: list[Path]) -> None:
    # It exits with 0 also if it does not know a key, so its silence is what counts.
    done = analyze("verify", "--man=no", *map(str, units))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_unit_with_a_key_that_systemd_does_not_know_is_noticed(units: list[Path]) -> None:
    units[0].write_text(units[0].read_text().replace("KillMode=", "KilMode="))
    done = analyze("verify", "--man=no", *map(str, units))
    assert "Unknown key 'KilMode'" in done.stderr


def test_the_server_is_confined(units: list[Path]) -> None:
    done = analyze("security", "--offline=true", "--threshold=20", "--no-pager", str(units[1]))
    assert done.returncode == 0, done.stdout


def test_the_agents_workers_are_not_confined() -> None:
    agent = settings(SYSTEMD / "rdzv-agent.service")
    assert not [key for key in agent if re.match("Protect|Private|Restrict|SystemCall", key)]
    assert agent["LimitMEMLOCK"] == agent["TasksMax"] == ["infinity"]
    # Whatever outlives the agent must survive its restart.
    assert (agent["KillMode"], agent["Delegate"]) == (["process"], ["yes"])
    assert agent["RuntimeDirectoryPreserve"] == ["restart"]
    assert agent["User"] == ["rdzv-agent"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_each_is_ended_when_it_hangs_and_says_when_it_is_ready(unit: Path) -> None:
    service = settings(unit)
    assert service["Type"] == ["notify"]
    assert "WatchdogSec" in service


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_each_checks_its_configuration_before_it_starts(unit: Path) -> None:
    service = settings(unit)
    program = f"/usr/bin/{unit.stem}"
    assert service["ExecStartPre"] == [f"{program} --check-config"]
    assert service["ExecStart"] == [program]
    config = configparser.ConfigParser(strict=False, allow_no_value=True, interpolation=None)
    config.optionxform = str  # type: ignore[assignment, method-assign]
    config.read(unit)
    assert config["Unit"]["StartLimitIntervalSec"] == "0"


class AnyMachine(AgentSettings, frozen=True):
    """Settings without the rules, which need this machine's accounts and programs."""

    rules = ()


SETTINGS: dict[str, type[Table]] = {"rdzvd": RdzvdSettings, "agent": AnyMachine}


def test_the_packages_configuration_of_rdzvd_is_in_order() -> None:
    config = load(RdzvdSettings, SYSTEMD / "rdzvd.toml").settings
    check(config)
    assert config.http is not None and config.http.loopback


@pytest.mark.parametrize("name", ["rdzvd", "agent"])
def test_every_line_of_the_packages_configuration_is_in_order(name: str, tmp_path: Path) -> None:
    shipped = SYSTEMD / f"{name}.toml"
    load(SETTINGS[name], shipped)
    lines = shipped.read_text().splitlines()
    # A suggested line has no space after its #; an explanation has.
    suggested = [line[1:] if re.match("#[a-z[]", line) else line for line in lines]
    assert suggested != lines
    file = tmp_path / "suggested.toml"
    file.write_text("\n".join(suggested))
    load(SETTINGS[name], file)
