"""rdzvd's configuration: every setting has an effect, and only reloadable ones are reloaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tls_files import Files

from rdzv.errors import InvalidRequestError
from rdzv.server.__main__ import main, reaches_etcd_by_tls
from rdzv.server.settings import configuration
from rdzv.server.settings.configuration import Configuration
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.rendering import render
from rdzv.settings.setting_types import settings_of
from rdzv.settings.toml_files import REMOVED, instead_of, load
from rdzv.transport.endpoints import Listen

SETTINGS = settings_of(RdzvdSettings)


@pytest.fixture(autouse=True)
def _no_file_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(configuration, "DEFAULT_FILE", tmp_path / "none" / "rdzvd.toml")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rdzvd.toml"


def read(file: Path, text: str, **given: object) -> RdzvdSettings:
    file.write_text(text)
    return Configuration(file, given).settings


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, args)
    return done.exit_code, done.output


# ------------------------------------------------------------------------------------ reading


def test_without_a_file_everything_has_the_default_of_its_field() -> None:
    assert Configuration(None, {}).settings == RdzvdSettings()


def test_each_default_is_within_its_bounds() -> None:
    for setting in SETTINGS.values():
        assert setting.least is None or setting.default >= setting.least, setting.key
        assert setting.most is None or setting.default <= setting.most, setting.key


def test_the_command_line_wins(file: Path) -> None:
    config = read(file, 'listen = "127.0.0.1:1"\nhttp = "127.0.0.1:2"', listen="127.0.0.1:3")
    assert (config.listen.port, config.http) == (3, Listen("127.0.0.1", 2))


@pytest.mark.slow
def test_every_option_that_sets_something_has_a_setting(file: Path, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("of etcd alone\n")
    options = {
        "--listen": "127.0.0.1:1",
        "--data-dir": str(tmp_path),
        "--store": "etcd",
        "--etcd-endpoints": "e1:1,e2:2",
        "--etcd-prefix": "/p",
        "--etcd-user": "me",
        "--etcd-password-file": str(password),
        "--etcd-ttl": "7",
        "--advertise": "n1:1",
        "--http": "127.0.0.1:4",
        "--auth": "required",
        "--init-admin-token": "/run/rdzv/admin",
        "--c10d": "127.0.0.1:5",
        "--c10d-python": "/usr/bin/python3",
        "--log-level": "debug",
        "--log-format": "json",
    }
    code, said = run("--print-config", *(f"{name}={value}" for name, value in options.items()))
    assert code == 0
    assert "of etcd alone" not in said
    file.write_text(said)
    config = Configuration(file, {}).settings
    etcd = config.etcd.config()
    assert etcd is not None
    assert [str(endpoint) for endpoint in etcd.endpoints] == ["e1:1", "e2:2"]
    assert (etcd.prefix, etcd.user, etcd.ttl_s) == ("/p", "me", 7)
    assert etcd.password == "of etcd alone"
    assert (config.authenticates, config.init_admin_token) == (True, Path("/run/rdzv/admin"))
    assert (config.c10d_python, config.log_format) == (Path("/usr/bin/python3"), "json")
    given = {f"--{name.replace('_', '-').replace('.', '-')}" for name in SETTINGS}
    assert given >= options.keys()


def test_a_token_that_nobody_has_to_show_is_not_made(file: Path) -> None:
    with pytest.raises(InvalidRequestError, match="give --auth=required with it"):
        read(file, 'init_admin_token = "/run/rdzv/admin"')


@pytest.mark.slow
def test_what_is_wrong_on_the_command_line_is_a_usage_error() -> None:
    assert run("--check-config", "--etcd-ttl=0")[0] == 2
    code, said = run("--check-config", "--listen=x")
    assert (
        code == 2
        and "`listen` = \"x\" cannot be used: endpoint 'x' cannot be used: it has no port; write"
        in said
    )


@pytest.mark.slow
def test_all_that_is_wrong_in_a_file_is_said_at_once(file: Path) -> None:
    file.write_text('lisen = 1\nstore = "disk"\n[retention]\nended_for = "0 s"\n')
    code, said = run("--check-config", f"--config={file}")
    assert code == 2
    assert "the configuration has 3 problems:" in said
    assert f"{file}: `lisen` is unknown; did you mean `listen`?" in said


@pytest.mark.parametrize("key", [*REMOVED, "upstream.ca"])
def test_what_to_do_in_place_of_a_removed_setting_is_said(file: Path, key: str) -> None:
    file.write_text(f"{key} = 1\n")
    option = f"--{key.replace('.', '-').replace('_', '-')}"
    for given in (f"--config={file}", option, f"{option}=1"):
        code, said = run("--check-config", given)
        assert code == 2
        assert f"was removed: {instead_of(key)}" in " ".join(said.split()), given


def test_an_unknown_setting_is_not_one_that_was_removed(file: Path) -> None:
    file.write_text("relays = 1\nlease.relay = 1\n")
    for given in (f"--config={file}", "--relays", "--lease-relay"):
        code, said = run("--check-config", given)
        assert code == 2 and "was removed" not in said


@pytest.mark.parametrize("url", ["grafana:3000", "ftp://g", "https://", "https://g/?orgId=1"])
def test_what_is_no_address_of_a_grafana_is_refused(file: Path, url: str) -> None:
    file.write_text(f'grafana = "{url}"\n')
    code, said = run("--check-config", f"--config={file}")
    assert code == 2
    assert "is not the address of a Grafana; give the URL of its first page" in said


def test_a_file_that_is_named_must_exist(tmp_path: Path) -> None:
    code, said = run("--check-config", f"--config={tmp_path / 'none.toml'}")
    assert code == 2 and "none.toml: it cannot be read: No such file or directory; write it" in said


@pytest.mark.slow
def test_the_usual_file_is_read_if_it_is_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--check-config") == (0, "rdzvd: the configuration is in order: defaults\n")
    monkeypatch.setattr(configuration, "DEFAULT_FILE", file)
    file.write_text('log_level = "error"')
    assert Configuration(None, {}).settings.log_level == "error"
    assert run("--check-config")[1].endswith(f"in order: {file}\n")
    said = run("--check-config", "--log-level=info")[1]
    assert said.endswith(f"in order: {file} and the command line\n")


def test_one_thing_is_done_instead_of_serving() -> None:
    code, said = run("--check", "--check-config")
    assert code == 2 and "--check and --check-config do not go together" in said


def test_a_secret_password_file_is_read_before_anything_starts(tmp_path: Path) -> None:
    code, said = run(
        *("--check-config", "--store=etcd", "--etcd-endpoints=e:1", "--etcd-user=me"),
        f"--etcd-password-file={tmp_path / 'none'}",
    )
    assert code == 2 and "etcd password file" in said


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            'lease.duration = "1 min"',
            '`lease.duration` = 60 is above `lease.longest` = 30; lower the one or raise the other',
        ),
    ],
)  # fmt: skip
def test_settings_have_to_agree(file: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(file, text)
    assert str(caught.value) == f"{file}: {problem}"


@pytest.mark.parametrize("key", REMOVED)
def test_what_was_removed_is_no_setting(key: str) -> None:
    assert key not in SETTINGS


def test_what_would_be_unsafe_is_refused_from_a_file_too(file: Path) -> None:
    with pytest.raises(InvalidRequestError, match="can be reached from other machines"):
        read(file, 'listen = "0.0.0.0:1"')
    assert read(file, 'listen = "0.0.0.0:1"\ninsecure = true').insecure


PAIR = 'tls.cert = "{0}/server.crt"\ntls.key = "{0}/server.key"\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nothing here is encrypted or authenticated"),
        (PAIR, "no caller is asked to authenticate"),
    ],
)
@pytest.mark.parametrize("port", ["listen", "http"])
def test_beyond_this_machine_it_is_encrypted_and_asks_who_connects(
    file: Path, port: str, text: str, problem: str
) -> None:
    files = Files(file.parent / "certs")
    text = f'{port} = "0.0.0.0:1"\n{text.format(files.folder)}'
    with pytest.raises(InvalidRequestError, match=problem):
        read(file, text)
    assert read(file, f"insecure = true\n{text}").open.startswith(problem)
    asking = f'{PAIR.format(files.folder)}tls.client_ca = "{files.ca}"'
    assert not read(file, f'{port} = "0.0.0.0:1"\n{asking}').open


def test_files_for_tls_that_can_not_be_used_are_refused(file: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"certificate .*server\.crt.*: No such file"):
        read(file, PAIR.format(file.parent))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('tls.cert = "/c"', "`tls.cert` and `tls.key` go together; one is missing"),
        ('tls.key = "/k"', "`tls.cert` and `tls.key` go together; one is missing"),
        ('tls.client_ca = "/ca"', "give `tls.cert` and `tls.key`"),
        ('tls.token_listen = "127.0.0.1:1"', "without `tls.client_ca` no caller is asked for one"),
        ('tls.http_client_auth = "accept"', "without `tls.client_ca` no caller is asked for one"),
    ],
)
def test_tls_takes_all_that_belongs_to_it(file: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        read(file, text)


ISSUER = 'oidc.issuer = "https://kubernetes.default.svc"\n'
ACCOUNT = '[[oidc.account]]\nnamespace = "team-a"\nroles = ["submit"]\n'


@pytest.mark.slow
def test_service_accounts_that_are_accepted_are_asked_for(file: Path) -> None:
    pytest.importorskip("jwt", reason="PyJWT is in the extra oidc")
    pair = PAIR.format(Files(file.parent / "certs").folder)
    config = read(file, f'listen = "0.0.0.0:1"\n{pair}{ISSUER}{ACCOUNT}')
    assert config.authenticates
    assert [(one.namespace, one.name, one.known_as) for one in config.oidc.account] == [
        ("team-a", None, "account")
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ISSUER, "without any .*oidc.account.* lets nobody in"),
        (ACCOUNT, "`oidc.account` without `oidc.issuer`"),
        (ISSUER + ACCOUNT, "tokens are taken by TLS alone"),
        (f'auth = "none"\n{PAIR}{ISSUER}{ACCOUNT}', "with `auth` = .none. nobody is asked"),
        (f"{PAIR}{ISSUER}{ACCOUNT}{ACCOUNT}", "has team-a/every account twice"),
        (ISSUER.replace("https", "http"), "is not an https address"),
        (ISSUER + ACCOUNT.replace("submit", "root"), "'root' is not a role"),
        (ISSUER + ACCOUNT.replace("submit", "node"), "node. go together"),
        (ISSUER + ACCOUNT.replace("team-a", "Team A"), "is no name of Kubernetes"),
    ],
)
def test_service_accounts_take_all_that_belongs_to_them(
    file: Path, text: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        read(file, text.replace("{0}", "/etc"))


@pytest.mark.parametrize(
    ("text", "given", "by_tls"),
    [
        ("", {}, False),
        ('etcd.endpoints = ["e:1"]', {"etcd_endpoints": None}, False),
        ('etcd.endpoints = ["https://e:1"]', {}, True),
        ('[etcd]\nca = "/ca"', {}, True),
        ("", {"etcd_endpoints": "e:1,https://f:1"}, True),
        ("", {"etcd_cert": Path("/c")}, True),
        ("etcd = 1", {}, False),
        ("no toml", {}, False),
    ],
)
def test_etcd_by_tls_is_known_before_grpc_is_loaded(
    file: Path, text: str, given: dict[str, Any], by_tls: bool
) -> None:
    file.write_text(text)
    assert reaches_etcd_by_tls(file, given) is by_tls


# ------------------------------------------------------------------------------------ reloading


def reload(configuration_: Configuration) -> bool:
    levels = logging.getLogger("rdzv.test")
    return configuration_.reload(lambda level, _: levels.setLevel(level.upper()))


@pytest.mark.slow
def test_a_reload_changes_what_everyone_holds(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file.write_text("limits.jobs = 5")
    held = Configuration(file, {})
    limits, retention = held.settings.limits, held.settings.retention
    file.write_text(
        'listen = "127.0.0.1:5"\nlog_level = "error"\nlimits.jobs = 6\n'
        'retention = { ended_for = "40 d", ended_jobs = 7 }\n'
    )
    assert reload(held)
    assert limits.jobs == 6 and retention.ended_jobs == 7
    assert retention.ended_for_ms == 40 * 86_400_000
    assert held.settings.limits is limits
    assert logging.getLogger("rdzv.test").level == logging.ERROR
    assert [record.getMessage() for record in caplog.records] == [
        'configuration: listen is to be "127.0.0.1:5" (it is "127.0.0.1:29400"): that needs a '
        "restart",
        'configuration: log_level is now "error" (it was "info")',
        'configuration: retention.ended_for is now "40 d" (it was "30 d")',
        "configuration: retention.ended_jobs is now 7 (it was 10000)",
        "configuration: limits.jobs is now 6 (it was 5)",
        f"reloaded the configuration from {file}: 4 applied, 1 waiting for a restart",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "limits.jobs = 6\nnonsense = 1",
        "limits.jobs = 6\n[",
        'limits.jobs = 6\netcd = { endpoints = ["e:1"], ca = "/none" }\nstore = "etcd"',
        'limits.jobs = 6\nlisten = "0.0.0.0:1"',
    ],
)
def test_a_broken_file_changes_nothing(
    file: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("limits.jobs = 5")
    held = Configuration(file, {})
    file.write_text(text)
    assert not reload(held)
    assert held.settings.limits.jobs == 5
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "did not reload the configuration; nothing was changed: " in record.getMessage()
    file.write_text("limits.jobs = 7")
    assert reload(held)
    assert held.settings.limits.jobs == 7


def test_a_file_that_is_gone_changes_nothing(file: Path) -> None:
    file.write_text("limits.jobs = 5")
    held = Configuration(file, {})
    file.unlink()
    assert not reload(held)
    assert held.settings.limits.jobs == 5


def test_the_command_line_is_not_reloaded_over(file: Path) -> None:
    file.write_text("")
    held = Configuration(file, {"log_level": "warning"})
    file.write_text('log_level = "debug"')
    assert reload(held)
    assert held.loaded.settings.log_level == "warning"


def test_only_what_is_read_at_each_use_is_reloaded() -> None:
    assert {key for key, setting in SETTINGS.items() if setting.reload} == {
        *("log_level", "log_format", "retention.ended_for", "retention.ended_jobs"),
        *("limits.jobs", "limits.nodes", "limits.http_streams"),
    }


@pytest.mark.slow
def test_what_is_printed_can_be_used_as_a_file(file: Path) -> None:
    loaded = load(RdzvdSettings)
    file.write_text(render(loaded))
    assert load(RdzvdSettings, file).settings == loaded.settings
