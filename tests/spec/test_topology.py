"""`nvidia-smi topo -m` output -> GPUs, NVLink groups, links, network cards of a host."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.topology import HostTopology, parse_topo

SAMPLES = Path(__file__).parents[1] / "samples"
H100 = catalog.device("h100-80gb")
A100 = catalog.device("a100-80gb")


def matrix(cells: list[list[str]], gpus: int) -> str:
    """The tool's form, from cells; devices after the first `gpus` are network cards."""
    names = [f"GPU{i}" if i < gpus else f"NIC{i - gpus}" for i in range(len(cells))]
    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for name, row in zip(names, cells, strict=True):
        tail = ["0-31", "0"] if name.startswith("GPU") else []
        lines.append("\t".join([name, *row, *tail]))
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n"


@pytest.mark.parametrize(
    ("file", "device", "seen"),
    [
        ("topo_8xh100", H100, {"gpus": 8, "island": 8, "nvlinks": 18, "switched": True, "nics": 8}),
        ("topo_4xa100_mesh", A100, {"gpus": 4, "island": 4, "nvlinks": 12, "nics": 2}),
        ("topo_8xa100_pairs", A100, {"gpus": 8, "island": 2, "nvlinks": 12, "nics": 0}),
    ],
    ids=["a switch with cards for storage", "a mesh without a switch", "pairs are islands"],
)
def test_a_host_is_read(file, device, seen):
    text = (SAMPLES / f"{file}.txt").read_text()
    assert parse_topo(text, device) == HostTopology(**({"switched": False} | seen))


def test_one_gpu():
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-31\t0\n"
    expected = HostTopology(gpus=1, island=1, nvlinks=0, switched=False, nics=0)
    assert parse_topo(text, H100) == expected


@pytest.mark.parametrize(
    ("change", "device", "words"),
    [
        (("GPU1", "GPUx"), H100, "has a row for GPU1"),  # which the heading does not name
        (("", ""), A100, "shows 18 NVLinks, but a100-80gb has 12"),
    ],
)
def test_a_wrong_gpu_or_heading_is_noticed(change, device, words):
    text = (SAMPLES / "topo_8xh100.txt").read_text()
    with pytest.raises(UserError, match=words):
        parse_topo(text.replace(*change, 1), device)


def test_uneven_groups_are_refused():
    cells = [["X", "NV4", "SYS"], ["NV4", "X", "SYS"], ["SYS", "SYS", "X"]]
    with pytest.raises(UserError, match="NVLink groups of different sizes"):
        parse_topo(matrix(cells, 3), A100)


@given(
    islands=st.integers(1, 4),
    size=st.integers(1, 8),
    links=st.integers(1, 18),
    nics=st.integers(0, 12),
    near=st.integers(0, 12),
    far=st.sampled_from(["SYS", "NODE", "PHB"]),
)
def test_any_regular_host_is_read_back(islands, size, links, nics, near, far):
    gpus, near = islands * size, min(near, nics)
    cells = []
    for i in range(gpus + nics):
        row = []
        for j in range(gpus + nics):
            pair = sorted((i, j))
            if i == j:
                row.append(" X ")
            elif pair[1] < gpus:
                row.append(f"NV{links}" if i // size == j // size else far)
            else:
                row.append("PXB" if pair[0] == 0 and pair[1] - gpus < near else far)
        cells.append(row)
    topo = parse_topo(matrix(cells, gpus), H100)
    switched = links * (size - 1) > 18
    assert (topo.gpus, topo.island, topo.nics) == (gpus, size, near or nics)
    assert topo.nvlinks == (links if switched else links * (size - 1))


@given(st.text(max_size=200))
def test_garbage_is_refused(text):
    with pytest.raises(UserError):
        parse_topo(text, H100)


@given(st.integers(0, 3000), st.integers(0, 3000), st.text(max_size=6))
def test_mutilated_output_is_read_or_refused(start, length, insert):
    text = (SAMPLES / "topo_8xh100.txt").read_text()
    cut = text[:start] + insert + text[start + length :]
    try:
        topo = parse_topo(cut, H100)
    except UserError:
        return
    assert 1 <= topo.island <= topo.gpus <= 8
