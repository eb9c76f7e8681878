"""`rdzvctl support-bundle`: what it contains, and that it contains no secret."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import control_samples
import pytest
from fake_control import Capture, FakeControl, serving

from rdzv.ctl.__main__ import run
from rdzv.ctl.support_bundle import HIDDEN, redacted
from rdzv.v1 import rdzv_pb2 as pb

pytestmark = pytest.mark.slow

TOKEN = "rdzv_0123abcd_" + "x" * 43


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"token {TOKEN} was refused", f"token {HIDDEN} was refused"),
        ("WANDB_API_KEY=abcdef012345", f"WANDB_API_KEY={HIDDEN}"),
        ('"args": ["--db-password=hunter22", "x"]', f'"args": ["--db-password={HIDDEN}", "x"]'),
        (
            '{\\"aws_secret_access_key\\": \\"abcd1234\\"}',
            f'{{\\"aws_secret_access_key\\": \\"{HIDDEN}\\"}}',
        ),
        ("https://ada:pw@host/data", f"https://{HIDDEN}@host/data"),
        ("Authorization: Bearer abc.def-ghi", f"Authorization: Bearer {HIDDEN}"),
        ("hf_" + "a" * 34, HIDDEN),
        ("token eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhZGEifQ.x_-y", f"token {HIDDEN}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----", HIDDEN),
        ("the tokens per second are 4000, seed=1234", "the tokens per second are 4000, seed=1234"),
        ("https://host:8080/path@2", "https://host:8080/path@2"),
        ("round 3 ended (node lost): n1:29400", "round 3 ended (node lost): n1:29400"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, expected: str) -> None:
    assert redacted(text) == expected


class Control(FakeControl):
    """Knows servers and nodes, too."""

    def ListServers(  # noqa: N802
        self, request: pb.ListServersRequest, context: object
    ) -> pb.ListServersResponse:
        return pb.ListServersResponse(servers=[pb.Server(address="n0:29400", leads=True)])

    def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: object
    ) -> pb.ListNodesResponse:
        return pb.ListNodesResponse(nodes=[pb.Node(node_id="n1", state="connected")])


@pytest.fixture
def control() -> FakeControl:
    control = Control()
    job = control_samples.running()
    control_samples.give_reason(job, f"waiting; {TOKEN}")
    control.jobs[job.rdzv_id] = job
    control.history = control_samples.history()
    return control


@pytest.mark.quick
def test_the_bundle_has_what_is_known_without_secrets(
    control: FakeControl, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "bundle.tar.gz"
    with serving(control) as endpoint:
        command = ["--server", endpoint, "support-bundle", "gpt-small", "-o", str(path), "--yes"]
        assert run(command) == 0
        assert run(command) == 1, "a file that is there is not replaced"
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        files = {
            Path(name).name: archive.extractfile(name).read().decode()  # type: ignore[union-attr]
            for name in archive.getnames()
        }
    assert {"status.json", "events.json", "explain.txt", "trace.json"} <= set(files)
    assert json.loads(files["status.json"])["rdzv_id"] == "gpt-small"
    assert HIDDEN in files["status.json"]
    assert not any(TOKEN in text for text in files.values())
    listed = capsys.readouterr().err
    assert all(name in listed for name in files), "they are listed before they are written"


def test_nothing_is_written_without_a_yes(
    control: FakeControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bundle.tar.gz"
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    with serving(control) as endpoint:
        assert run(["--server", endpoint, "support-bundle", "gpt-small", "-o", str(path)]) == 130
    assert not path.exists()


def test_an_unknown_job_is_an_error(tmp_path: Path) -> None:
    with serving(FakeControl()) as endpoint:
        assert run(["--server", endpoint, "support-bundle", "nix", "--yes"]) == 1
