"""The configuration of rdzv-agent: what is refused, and what it means for a submitted job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tls_files import Files

from rdzv.agent import __main__ as main
from rdzv.agent.app import agent_settings, daemon
from rdzv.agent.app.agent_config import check_directories, read_config
from rdzv.agent.app.agent_settings import AgentSettings, own_account
from rdzv.agent.inventory.health_checks import Command, Disk, Gpus, Xids
from rdzv.core.fleet.node_resources import Gpu, NodeResources
from rdzv.errors import InvalidRequestError
from rdzv.settings.rendering import render
from rdzv.settings.toml_files import compare, load
from rdzv.transport.channels import Credentials
from tests.support.accounts import needs_root, own_folder, passable_folder

OWN = own_account()


def written(folder: Path, lines: str, *, account: str = OWN) -> Path:
    path = folder / "agent.toml"
    said = f'account = "{account}"\n' if account else ""
    path.write_text(f'server = "head:1"\n{said}{lines}\n')
    return path


def settings_of(path: Path) -> AgentSettings:
    return read_config(path)[0].settings


def test_the_least_configuration_is_enough(tmp_path: Path) -> None:
    loaded, launches = read_config(written(tmp_path, ""))
    settings = loaded.settings
    assert [str(endpoint) for endpoint in settings.endpoints] == ["head:1"]
    assert settings.node_id == os.uname().nodename
    assert (settings.capacity, settings.labels, launches) == (1, {}, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gpu-7", 'node_id = "gpu-7"'),
        ("gpu 7", "come from RDZV_NODE_ID or the host name: 'gpu 7' has"),
    ],
)
def test_the_environment_may_name_the_node(tmp_path: Path, name: str, shown: str) -> None:
    """As in a DaemonSet, whose pods all have the same file."""
    done = subprocess.run(
        [sys.executable, "-m", "rdzv.agent", "--print-config", f"--config={written(tmp_path, '')}"],
        capture_output=True,
        text=True,
        env={**os.environ, "RDZV_NODE_ID": name},
        check=False,
    )
    assert shown in done.stdout + done.stderr


@pytest.mark.slow
def test_it_connects_with_its_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path / "certs")
    node, token = files.node("n1"), tmp_path / "token"
    token.write_text("abc")
    lines = f'[tls]\nca = "{node.ca}"\ncert = "{node.cert}"\nkey = "{node.key}"'
    assert settings_of(written(tmp_path, lines)).credentials() == node
    monkeypatch.setenv("RDZV_TLS_CA", str(files.ca))
    found = settings_of(written(tmp_path, f'token_file = "{token}"')).credentials()
    assert found == Credentials(ca=files.ca, token_file=token)
    with pytest.raises(InvalidRequestError, match="one without the other"):
        read_config(written(tmp_path, f'[tls]\ncert = "{node.cert}"'))


@pytest.mark.slow
def test_a_job_of_its_file_has_no_credentials_of_its_own(tmp_path: Path) -> None:
    args = '["--rdzv-id=a", "--nnodes=2", "--tls-ca=/ca.crt", "train.py"]'
    with pytest.raises(InvalidRequestError, match="include credentials"):
        read_config(written(tmp_path, f"[[job]]\nargs = {args}"))


@pytest.mark.slow
def test_what_is_printed_is_the_same_configuration(tmp_path: Path) -> None:
    lines = 'gpus = "GPU-a,GPU-b"\ncapacity = 3\n[labels]\ngpu = "h100"\n[logs]\nkeep = "2 d"\n'
    lines += (
        '[[health]]\ncheck = "disk"\npath = "/"\nmin_free = 1\n[[health]]\ncheck = "gpu"\ncount = 0'
    )
    loaded = read_config(written(tmp_path, lines))[0]
    again = tmp_path / "again.toml"
    again.write_text(render(loaded))
    assert load(AgentSettings, again).settings == loaded.settings


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("capacity = 0", "`capacity` = 0 must be a whole number without quotes, 1 to 256"),
        ('gpus = "0,1"', "'0' is not the UUID of a GPU; give those of `nvidia-smi -L`"),
        ('gpus = "GPU-a,GPU-a"', "GPU-a is named twice"),
        ('node_id = "../n1"', "'../n1' has characters that are not allowed; use letters"),
        ('state_dir = "runs"', '`state_dir` = "runs" must be a path from / on, such as'),
        ('pass_env = ["A*B"]', "'A*B' is not a variable name"),
        ('python = "/no/python"', "`python` = '/no/python' is not a program on this node"),
        ('[env]\n"A=B" = "x"', "`env`: variable 'A=B' has characters that are not allowed"),
        (
            '[env]\n"A B" = "x"',
            "`env`: variable 'A B' has characters that are not allowed; use letters",
        ),
        ('[env]\nA = "\\u0000"', "`env` 'A' has a value with a NUL character; leave it out"),
        ('[env]\nRANK = "1"', "`env`: variable RANK: it is different in every worker"),
        (
            '[env]\nCUDA_VISIBLE_DEVICES = "3"',
            "each node assigns GPUs to the job; name those to use in `gpus`",
        ),
        ('[labels]\n"a=b" = "x"', "`labels` 'a=b' has characters that are not allowed"),
        ('[labels]\n"a b" = "x"', "`labels` 'a b' has characters that are not allowed"),
        (f'[labels]\na = "{"x" * 256}"', "has 256 characters; give at most 255"),
        ('[labels]\ngpu = "\\u0007"', "has characters that cannot be printed"),
        ("[logs]\nkeep = -1", "`logs.keep` = -1 must be a number of seconds, or a text such as"),
        (
            '[[health]]\ncheck = "fan"',
            '`health[1].check` = "fan" must be one of "command", "disk", "gpu", "xid"',
        ),
        ('[[health]]\ncheck = "command"', "`command` is missing, or empty; give the program"),
        ('[[health]]\ncheck = "disk"\nmin_free = 1', "`path` is missing; name a folder"),
        ('[[health]]\ncheck = "disk"\npath = "/"', "`min_free` or `min_free_percent` is missing"),
        (
            '[[health]]\ncheck = "gpu"\npath = "/"',
            "`path` is not a setting of gpu checks; leave it out",
        ),
        ('[[health]]\ncheck = "xid"\ncodes = ["x"]', "'x' is not an Xid number"),
        (
            '[[health]]\ncheck = "gpu"\ntimeout = "1 min"',
            "with one of d, h, min, s, ms, 100 ms to 15 s",
        ),
        ("[[job]]", "`job[1].args` is missing: The arguments of rdzvrun"),
        ('[[job]]\nargs = "b"', '`job[1].args` = "b" must be a list of texts'),
        ('[[job]]\nargs = ["--rdzv-id=a", "t"]\nuser = "b"', "`job[1].user` is unknown; "),
        ('[[job]]\nargs = ["t"]', "--rdzv-id is missing"),
        ('[[job]]\nargs = ["--no-such"]', "args ['--no-such']: --no-such is not a flag"),
        ('[[job]]\nargs = ["--rdzv-id=a", "no.py"]', "the script 'no.py' is not on this node"),
        *(
            (
                f'[[job]]\nargs = ["--rdzv-id=a", "{own}", "--no-python", "true"]',
                "replace --node-id, --rdzv-endpoint and --standalone by the settings `node_id`",
            )
            for own in ("--node-id=b", "--rdzv-endpoint=b", "--standalone")
        ),
    ],
)
def test_a_senseless_value_is_refused_by_name(tmp_path: Path, lines: str, said: str) -> None:
    path = written(tmp_path, lines)
    with pytest.raises(InvalidRequestError) as refused:
        read_config(path)
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(path))


# ------------------------------------------------------------------ whom jobs run as


def test_root_takes_jobs_only_if_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(InvalidRequestError, match='set account = "root"'):
        read_config(written(tmp_path, "", account=""))
    assert read_config(written(tmp_path, "", account="root"))


SHIPPED = Path(__file__).parents[3] / "deploy" / "systemd" / "agent.toml"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--check-config", "--print-config"])
def test_root_may_look_at_the_file_as_it_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """The head of the file recommends both, and the unit starts the agent as another account."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    result = CliRunner().invoke(main.main, [f"--config={SHIPPED}", option])
    assert result.exit_code == 0, result.output
    assert (
        "it cannot start as root, the account used here: rdzv-agent runs as root" in result.stderr
    )
    with pytest.raises(InvalidRequestError, match="rdzv-agent runs as root"):
        read_config(SHIPPED)


def test_root_runs_what_its_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    script = tmp_path / "train.py"
    script.touch()
    job = f'[[job]]\nargs = ["--rdzv-id=night", "{script}"]'
    _, (launch,) = read_config(written(tmp_path, job, account=""))
    assert launch.job.rdzv_id == "night"


def test_another_user_takes_jobs_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setattr(agent_settings, "own_account", lambda: "train")
    assert read_config(written(tmp_path, "", account=""))
    assert read_config(written(tmp_path, "", account="train"))


def users(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch, uid: int = 0) -> Path:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    return written(folder, lines, account="")


def test_submitters_are_mapped_to_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        '[[user]]\nname = "ci"\naccounts = ["root"]\numask = "0077"\n'
        'limits = {core = "0", nofile = "9:10"}\n[[user]]\nname = "*"\n'
    )
    found = settings_of(users(tmp_path, lines, monkeypatch)).accounts().account_for("ci")
    assert found is not None
    assert (found.name, found.identity.umask) == ("root", 0o077)
    assert found.identity.limits == (("core", 0, 0), ("nofile", 9, 10))


@pytest.mark.parametrize(
    ("lines", "uid", "why"),
    [
        ('[[user]]\nname = "a"\n[[user]]\nname = "a"', 0, "two [[user]] entries are named 'a'"),
        ('account = "root"\n[[user]]\nname = "a"', 0, "both set the account of submitted jobs"),
        (
            '[[user]]\nname = "*"\naccounts = ["root"]',
            0,
            "has the account root, and means every",
        ),
        ('[[user]]\nname = "a"\nlimits = {x = "1"}', 0, "'x' cannot be limited; give one of as"),
        ('[[user]]\nname = "a"\numask = "9"', 0, "'9' is not a umask"),
        ('[[user]]\naccounts = ["a"]', 0, "`user[1].name` is missing"),
        (
            '[[user]]\nname = "a"\naccounts = ["mail"]',
            65534,
            "only root can start jobs under other accounts",
        ),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, uid: int, why: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_config(users(tmp_path, lines, monkeypatch, uid))
    assert why in str(refused.value)


def test_accounts_can_reach_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    lines = f'state_dir = "{closed}/state"\nruntime_dir = "/tmp"\n[[user]]\nname = "*"'
    with pytest.raises(InvalidRequestError, match=r"cannot enter .* let others pass: chmod o\+x"):
        check_directories(settings_of(users(tmp_path, lines, monkeypatch)))


def test_no_job_runs_as_somebody_else(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_config(written(tmp_path, "", account="somebody"))
    assert f"`account` = 'somebody' is not the account that rdzv-agent runs as, {OWN}" in str(
        refused.value
    )


# ------------------------------------------------------------------ the environment of jobs


def test_a_job_gets_what_is_passed_on_and_what_is_set_and_nothing_else(tmp_path: Path) -> None:
    config = settings_of(written(tmp_path, '[env]\nLANG = "C"\nNCCL_DEBUG = "INFO"'))
    own = {"PATH": "/bin", "LC_TIME": "C", "LANG": "de", "SECRET": "x", "PYTHONPATH": "/agent"}
    environ = config.job_environ(own)
    assert environ["PATH"] == "/bin"
    assert environ["LC_TIME"] == "C"
    assert environ["LANG"] == "C"
    assert environ["NCCL_DEBUG"] == "INFO"
    assert not environ.keys() & {"SECRET", "PYTHONPATH", "PYTHON_EXEC"}


def test_a_job_of_a_service_has_the_home_of_its_account(tmp_path: Path) -> None:
    environ = settings_of(written(tmp_path, "")).job_environ({})
    assert {"PATH", "HOME", "USER", "LOGNAME", "SHELL"} <= environ.keys()
    assert environ["USER"] == OWN


def test_the_interpreter_of_jobs_can_be_named(tmp_path: Path) -> None:
    config = settings_of(written(tmp_path, 'python = "/bin/sh"'))
    assert config.job_environ({})["PYTHON_EXEC"] == "/bin/sh"
    config = settings_of(written(tmp_path, 'python = "/bin/sh"\n[env]\nPYTHON_EXEC = "/bin/true"'))
    assert config.job_environ({})["PYTHON_EXEC"] == "/bin/true"


# ------------------------------------------------------------------ exit codes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "exit_code"), [(None, 0), (KeyError("bug"), 75), (OSError(28, "No space"), 75)]
)
async def test_a_daemon_that_can_not_go_on_asks_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Exception | None, exit_code: int
) -> None:
    async def serve(*_: object) -> None:
        if trouble is not None:
            raise trouble

    monkeypatch.setattr(daemon, "serve", serve)
    path = written(tmp_path, "")
    assert await main.run_agent(path, *read_config(path)) == exit_code


async def test_a_configuration_that_does_not_fit_the_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    path = written(tmp_path, f'state_dir = "{tmp_path / "file" / "state"}"')
    with pytest.raises(InvalidRequestError, match=r"cannot create `state_dir` = "):
        await main.run_agent(path, *read_config(path))


# ------------------------------------------------------------------ --check-config


def checked(path: Path) -> Result:
    return CliRunner().invoke(main.main, ["--config", str(path), "--check-config"])


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("{folder}/file/a/b", "/file/a/b' in {folder}/file: Not a directory; give another"),
        ("{folder}/file", "cannot write to `{key}` = '{folder}/file': Not a directory; give"),
        ("/proc/a/b", "cannot create `{key}` = '/proc/a/b' in /proc: "),
    ],
)
@pytest.mark.parametrize("key", ["state_dir", "runtime_dir"])
def test_a_check_refuses_an_unusable_folder(
    tmp_path: Path, key: str, place: str, said: str
) -> None:
    (tmp_path / "file").touch()
    path = written(tmp_path, f'{key} = "{place.format(folder=tmp_path)}"')
    result = checked(path)
    assert result.exit_code == 2
    assert said.format(folder=tmp_path, key=key) in result.output


@needs_root
@pytest.mark.parametrize("key", ["state_dir", "runtime_dir"])
def test_a_check_refuses_a_folder_that_the_start_refuses(tmp_path: Path, key: str) -> None:
    with passable_folder() as folder:
        config = [f'{name} = "{folder}/{name}/x"' for name in ("state_dir", "runtime_dir")]
        users = '[[user]]\nname = "*"'
        path = written(tmp_path, "\n".join([*config, users]), account="")
        assert checked(path).exit_code == 0
        own_folder(folder, key).chmod(0o711)
        result = checked(path)
        assert result.exit_code == 2
        assert f"`{key}` = '{folder}/{key}/x' is not safe: {folder}/{key} belongs to" in (
            result.output
        )
        # Root may check the configuration of an agent that runs as that account.
        path = written(tmp_path, "\n".join(config))
        assert checked(path).exit_code == 0


def test_a_check_makes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, f'state_dir = "{tmp_path / "a" / "b"}"')
    assert checked(path).exit_code == 0
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert checked(path).exit_code == 0
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_agent_with_jobs_of_its_own_needs_no_folder(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    job = f'[[job]]\nargs = ["--rdzv-id=night", "{script}"]'
    path = written(tmp_path, f'state_dir = "{script}/state"\n{job}')
    assert checked(path).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            '["--rdzv-id=night"]',
            "args ['--rdzv-id=night']: what is to run is missing; give a script",
        ),
        ('["--help"]', "args ['--help']: --help runs nothing; leave it out"),
    ],
)
def test_of_arguments_that_are_not_rdzvruns_the_reason_alone_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], args: str, said: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_config(written(tmp_path, f"[[job]]\nargs = {args}"))
    assert said in str(refused.value)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


# ------------------------------------------------------------------ reloads


def test_a_reload_applies_what_running_jobs_do_not_depend_on(tmp_path: Path) -> None:
    before = read_config(written(tmp_path, 'topology = "rack-1"'))[0]
    lines = 'topology = "rack-2"\ncapacity = 2\nlog_level = "debug"\n[labels]\na = "b"\n'
    after = read_config(written(tmp_path, lines))[0]
    change = compare(before, after)
    assert set(change.applied) == {"capacity", "log_level", "labels"}
    assert change.waiting == ("topology",)
    assert change.loaded.settings.topology == "rack-1"


# ------------------------------------------------------------------ checks


def test_checks_are_made_as_they_are_written(tmp_path: Path) -> None:
    lines = """
[[health]]
check = "command"
command = ["/usr/bin/check-nfs", "/data"]
timeout = "3 s"
[[health]]
check = "disk"
path = "/data"
min_free_percent = 5
[[health]]
check = "disk"
name = "scratch"
path = "/"
min_free = "10 GiB"
[[health]]
check = "gpu"
[[health]]
check = "xid"
codes = ["79"]
"""
    has = NodeResources(gpus=(Gpu("GPU-a", "", 0),))
    config = settings_of(written(tmp_path, lines))
    command, data, scratch, gpu, xid = config.checks(has, {"PATH": "/bin"})
    assert isinstance(command, Command)
    assert (command.name, command.timeout_s) == ("command check-nfs", 3.0)
    assert (command.args, command.environ) == (("/usr/bin/check-nfs", "/data"), {"PATH": "/bin"})
    assert isinstance(data, Disk) and isinstance(scratch, Disk)
    assert (data.name, data.path, data.min_free_percent) == ("disk /data", Path("/data"), 5.0)
    assert (scratch.name, scratch.min_free_bytes) == ("scratch", 10 << 30)
    assert isinstance(gpu, Gpus) and isinstance(xid, Xids)
    assert (gpu.name, list(gpu.uuids), gpu.memory_used) == ("gpu", ["GPU-a"], 2 << 30)
    assert (xid.name, xid.codes, xid.log) == ("xid", ("79",), Path("/dev/kmsg"))


def test_checks_are_for_an_agent_that_takes_submitted_jobs(tmp_path: Path) -> None:
    lines = '[[health]]\ncheck = "gpu"\n[[job]]\nargs = ["--rdzv-id=a", "--no-python", "true"]'
    with pytest.raises(InvalidRequestError, match="`health` applies to submitted jobs"):
        read_config(written(tmp_path, lines))
