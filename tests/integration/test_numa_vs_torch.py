"""Workers are bound to the same CPUs as by torch, on every machine that torch can bind on.

torch's own functions are pointed at trees like /sys, and told which GPUs there are.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.agent.launch.numa import NumaBinding, bound_cpus, format_cpu_list, parse_cpu_list
from rdzv.errors import InvalidRequestError
from tests.support.numa_trees.machines import (
    EIGHT_GPUS,
    WITH_EMPTY_NODES,
    WORKSTATION,
    ZEN,
    Machine,
    write_files,
    write_recorded,
)

binding = pytest.importorskip("torch.numa.binding", reason="torch with NUMA binding is missing")

RECORDED_GPU = Machine(gpu_nodes=(-1, -1))


class Torch:
    """torch's binding on a machine of our choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sysfs = Path("/sys")
        self._gpus: Sequence[str] = ()
        self._allowed: frozenset[int] = frozenset()
        monkeypatch.setattr(binding, "open", self._open, raising=False)
        fake_os = SimpleNamespace(
            path=os.path,
            listdir=lambda path: [entry.name for entry in self._moved(path).iterdir()],
            sched_getaffinity=lambda _: set(self._allowed),
        )
        monkeypatch.setattr(binding, "os", fake_os)
        # It needs this in the end to apply the binding; whether it is installed does not matter.
        monkeypatch.setattr(binding, "shutil", SimpleNamespace(which=lambda _: "/bin/numactl"))
        cuda = SimpleNamespace(
            device_count=lambda: len(self._gpus), get_device_properties=self._properties
        )
        monkeypatch.setattr(binding, "torch", SimpleNamespace(cuda=cuda))

    def bound_cpus(
        self, mode: NumaBinding, gpu: int, gpus: Sequence[str], sysfs: Path, allowed: frozenset[int]
    ) -> frozenset[int]:
        self._sysfs, self._gpus, self._allowed = sysfs, gpus, allowed
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode.value))
        cpus = binding._get_validated_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options)
        return frozenset(cpus)

    def _moved(self, path: str) -> Path:
        return self._sysfs / Path(path).relative_to("/sys")

    def _open(self, path: str) -> Any:
        return self._moved(path).open()

    def _properties(self, gpu: int) -> SimpleNamespace:
        domain, bus, device = self._gpus[gpu].removesuffix(".0").split(":")
        return SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(device, 16)
        )


@pytest.fixture(scope="module")
def torch() -> Iterator[Torch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Torch(monkeypatch)


def ours(
    mode: NumaBinding, rank: int, gpus: Sequence[str], sysfs: Path, allowed: frozenset[int]
) -> frozenset[int] | None:
    """Return our binding; nothing if we refuse."""
    try:
        return bound_cpus(mode, rank, len(gpus), gpus, allowed=allowed, sysfs=sysfs)
    except InvalidRequestError:
        return None


def compare_one(
    torch: Torch,
    mode: NumaBinding,
    rank: int,
    gpus: Sequence[str],
    sysfs: Path,
    allowed: frozenset[int],
) -> frozenset[int] | None:
    """Check that both give the same CPUs, or none; return them."""
    found = ours(mode, rank, gpus, sysfs, allowed)
    try:
        theirs = torch.bound_cpus(mode, rank, gpus, sysfs, allowed)
    except (RuntimeError, ValueError, ZeroDivisionError):  # Whatever it fails with.
        theirs = None
    assert found == theirs, (mode, rank)
    return found


def compare(
    torch: Torch,
    machine: Machine,
    sysfs: Path,
    allowed: frozenset[int],
    modes: Iterable[NumaBinding] = NumaBinding,
) -> list[str]:
    """Compare all workers in all modes; return their bindings."""
    found = [
        compare_one(torch, mode, rank, machine.gpus, sysfs, allowed)
        for mode in modes
        for rank in range(len(machine.gpus))
    ]
    return [format_cpu_list(cpus) for cpus in found if cpus is not None]


ALL_BUT_SOCKET = [mode for mode in NumaBinding if mode is not NumaBinding.SOCKET]


@pytest.mark.parametrize(
    ("machine", "allowed"),
    [
        pytest.param(WORKSTATION, "", id="one node, no hyperthreads, its number unknown"),
        pytest.param(EIGHT_GPUS, "", id="two sockets with two nodes and hyperthreads"),
        pytest.param(EIGHT_GPUS, "0-8,14-16,21-30,40,50", id="a container with some of the CPUs"),
        pytest.param(ZEN, "", id="several core complexes per node"),
        pytest.param(ZEN, "0,2-3,4-5,6-8,16", id="core complexes, not all usable"),
        pytest.param(
            replace(EIGHT_GPUS, cpu_lists={0: "0,1,2,3-6,28,29-34", 1: "7-13,35-41,"}),
            "",
            id="lists spelled in other ways",
        ),
        pytest.param(replace(ZEN, threads=4, sockets=1, gpu_nodes=(0, 0)), "", id="four threads"),
    ],
)
def test_the_same_cpus_as_torch(
    torch: Torch, tmp_path: Path, machine: Machine, allowed: str
) -> None:
    sysfs = machine.write(tmp_path)
    usable = parse_cpu_list(allowed) or machine.cpus
    assert len(compare(torch, machine, sysfs, usable)) == len(NumaBinding) * len(machine.gpus)


def test_the_same_cpus_on_a_recorded_machine(torch: Torch, tmp_path: Path) -> None:
    write_recorded(tmp_path, "kvm_2_cpus")
    gpu_files = {name: text for name, text in RECORDED_GPU.files() if name.startswith("bus")}
    write_files(tmp_path, gpu_files)
    found = compare(torch, RECORDED_GPU, tmp_path, frozenset({0, 1}))
    assert found == ["0-1"] * 4 + ["0", "1"] + ["0-1"] * 2


@pytest.mark.parametrize("allowed", ["0-6", "7", "27,55"])
def test_refused_where_torch_fails(torch: Torch, tmp_path: Path, allowed: str) -> None:
    machine = replace(EIGHT_GPUS, gpu_nodes=(1, 1, 2))
    sysfs = machine.write(tmp_path)
    compare(torch, machine, sysfs, parse_cpu_list(allowed), ALL_BUT_SOCKET)


def test_nodes_without_cpus_matter_to_torch_only_for_the_socket(
    torch: Torch, tmp_path: Path
) -> None:
    machine = WITH_EMPTY_NODES
    sysfs = machine.write(tmp_path)
    assert len(compare(torch, machine, sysfs, machine.cpus, ALL_BUT_SOCKET)) == 6
    with pytest.raises(ValueError, match="empty"):
        torch.bound_cpus(NumaBinding.SOCKET, 0, machine.gpus, sysfs, machine.cpus)
    found = ours(NumaBinding.SOCKET, 0, machine.gpus, sysfs, machine.cpus)
    assert found == parse_cpu_list("0-3,8-11")


SHAPES = [
    replace(shape, gpu_nodes=tuple(range(-1, shape.nodes)) * 3)
    for shape in (
        Machine(),
        Machine(cores_per_complex=2, threads=2, complexes_per_node=2),
        Machine(sockets=2, cores_per_complex=1, complexes_per_node=3),
        Machine(nodes_per_socket=2, cores_per_complex=3, threads=2),
        Machine(sockets=2, nodes_per_socket=2, cores_per_complex=2),
    )
]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [shape.write(tmp_path_factory.mktemp("sys")) for shape in SHAPES]


@settings(SETTLED, max_examples=200)
@given(data=st.data())
def test_the_same_cpus_as_torch_with_any_gpus_and_any_allowed_cpus(
    torch: Torch, trees: list[Path], data: st.DataObject
) -> None:
    sysfs, machine = data.draw(st.sampled_from(list(zip(trees, SHAPES, strict=True))))
    gpus = data.draw(st.lists(st.sampled_from(machine.gpus), min_size=1, max_size=8, unique=True))
    some = st.frozensets(st.sampled_from(sorted(machine.cpus)), min_size=1)
    allowed = data.draw(st.just(machine.cpus) | some)
    lists = sysfs.glob("devices/system/node/node*/cpulist")
    all_usable = all(parse_cpu_list(path.read_text()) & allowed for path in lists)
    modes = list(NumaBinding) if all_usable else ALL_BUT_SOCKET
    rank = data.draw(st.integers(0, len(gpus) - 1))
    compare_one(torch, data.draw(st.sampled_from(modes)), rank, gpus, sysfs, allowed)
