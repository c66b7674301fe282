"""`fourfold clusters`: the catalogue, one entry, and files for clusters of one's own.

The samples of tests/samples are composed in the tools' public formats, not measured.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fourfold.spec import catalog

SAMPLES = Path(__file__).parents[1] / "samples"
NEW = ["clusters", "new", "--name", "mine"]
H100 = ["--gpu", "h100-80gb"]


def test_every_gpu_and_cluster_is_listed(cli):
    listed = cli("clusters")
    for name in (*catalog.cluster_names(), *catalog.device_names()):
        assert name in listed
    data = cli.json("clusters")
    assert {row["name"] for row in data["clusters"]} == set(catalog.cluster_names())
    assert {row["id"] for row in data["gpus"]} == set(catalog.device_names())


@pytest.mark.parametrize("style", ["text", "md", "csv", "json"])
def test_details(cli, style):
    assert "network" in cli("clusters", "jean-zay", "--format", style)
    assert "989" in cli("clusters", "--gpu", "h100-80gb", "--format", style)


def test_the_json_of_a_gpu_adds_one(cli, tmp_path):
    data = cli.json("clusters", "--gpu", "h100-80gb")
    data |= {"id": "h100-special", "memory_bytes": "120GiB"}
    path = tmp_path / "special.json"
    path.write_text(json.dumps(data))
    assert "120.00" in cli("clusters", "--gpu", path)
    out = tmp_path / "mine.toml"
    cli(*NEW, "--gpu", path, "--hosts", "2", "--host-gpus", "8",
         "--network", "800Gbit/s", "--out", out)  # fmt: skip
    assert catalog.cluster(str(out)).device == catalog.device(str(path))


def test_a_file_from_answers(cli, tmp_path):
    out = tmp_path / "mine.toml"
    words = [*NEW, *H100, "--hosts", "16", "--host-gpus", "8", "--network", "3200Gbit/s"]
    cli(*words, "--price", "2.5", "--out", out)
    cluster = catalog.cluster(str(out))
    assert (cluster.gpus, cluster.hosts, cluster.price_per_gpu_hour) == (128, 16, 2.5)
    assert [(link.ranks, link.bytes_per_s) for link in cluster.links] == [(8, 450e9), (128, 50e9)]
    before = out.read_bytes()
    assert "--force" in cli(*words, "--out", out, status=2)
    assert out.read_bytes() == before
    cli(*words, "--hosts", "4", "--out", out, "--force")
    assert catalog.cluster(str(out)).gpus == 32


def test_a_rack_wide_nvlink_domain(cli):
    words = [*NEW, "--gpu", "gb200", "--hosts", "36", "--host-gpus", "4", "--nvlink-ranks", "72",
             "--network", "1600Gbit/s"]  # fmt: skip
    links = cli.json(*words)["links"]
    assert [(link["ranks"], link["bytes_per_s"]) for link in links] == [(72, 900e9), (144, 50e9)]


def test_a_file_from_topology_and_logs(cli, tmp_path):
    out = tmp_path / "mine.toml"
    logs = [str(SAMPLES / name) for name in ("all_reduce_1x8.log", "all_reduce_4x8.log")]
    topo = str(SAMPLES / "topo_8xh100.txt")
    cli(*NEW, "--topo", topo, "--nccl-tests", *logs, "--out", out)
    cluster = catalog.cluster(str(out))
    assert (cluster.device.id, cluster.host_gpus, cluster.gpus) == ("h100-80gb", 8, 32)
    inner, outer = cluster.links
    assert inner.bytes_per_s == pytest.approx(362e9, rel=0.02)
    assert inner.latency_s == pytest.approx(2.4e-6, rel=0.05)
    assert outer.bytes_per_s == pytest.approx(336e9 / 8, rel=0.02)
    assert "measured" in cluster.source


def test_topology_alone_counts_links_and_cards(cli):
    topo = str(SAMPLES / "topo_8xh100.txt")
    words = [*NEW, *H100, "--hosts", "2", "--topo", topo]
    made = cli(*words, "--nic-rate", "400Gbit/s")
    assert 'bytes_per_s = "450GB/s"' in made
    assert 'bytes_per_s = "50GB/s"' in made
    assert "8 cards of 400Gbit/s" in made
    assert "8 cards seen" in cli(*words, status=2)


def test_islands_need_the_rate_of_pcie(cli):
    topo = str(SAMPLES / "topo_8xa100_pairs.txt")
    words = [*NEW, "--gpu", "a100-80gb", "--hosts", "1", "--topo", topo]
    assert "--pcie RATE" in cli(*words, status=2)
    made = cli.json(*words, "--pcie", "25GB/s")
    levels = [(link["name"], link["ranks"], link["bytes_per_s"]) for link in made["links"]]
    assert levels == [("nvlink", 2, 300e9), ("pcie", 8, 25e9)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_questions_on_a_terminal(cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal("mine\nh100-80gb\n8\n4\n1600Gbit/s\n"))
    made = cli("clusters", "new")
    assert 'name = "mine"' in made
    assert 'bytes_per_s = "25GB/s"' in made
    assert "number of hosts? " in cli.err
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert "is required" in cli("clusters", "new", status=2)


def test_the_shipped_clusters_agree_with_their_gpus():
    for name in catalog.cluster_names():
        cluster = catalog.cluster(name)
        assert cluster.links[0].bytes_per_s == cluster.device.peer_bytes_per_s, name
        assert cluster.source, name


def test_a_tray_of_four_behind_a_switch_may_be_part_of_a_rack(tmp_path, cli):
    names = [f"GPU{i}" for i in range(4)]
    rows = [[name, *("X" if name == peer else "NV18" for peer in names)] for name in names]
    (tmp_path / "topo.txt").write_text("\n".join("\t".join(row) for row in [["", *names], *rows]))
    words = ["clusters", "new", "--name", "x", "--gpu", "gb200", "--hosts", "36", "--network"]
    words += ["1600Gbit/s", "--topo", str(tmp_path / "topo.txt")]
    cli.json(*words)
    assert "--nvlink-ranks 72" in cli.err
    links = cli.json(*words, "--nvlink-ranks", "72")["links"]
    assert "--nvlink-ranks" not in cli.err
    assert [link["ranks"] for link in links] == [72, 144]
    assert cli.out.endswith("}\n")
