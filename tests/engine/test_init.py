"""Initial values: functions of seed, name and global index alone, for any cut."""

from __future__ import annotations

import torch

from fourfold.cost.count.params import tensors
from fourfold.engine.data import rng
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.parallel.groups import Group
from fourfold.engine.parallel.shards import InitRule, ShardPlace, initialize, shards_of
from fourfold.engine.parallel.tensor import apply_tensor
from fourfold.spec.catalog import model

SEQ_LEN = 32
RULE = InitRule(vector_std=0.1)


def whole(name: str, seed: int) -> dict[str, torch.Tensor]:
    decoder = Decoder(model(name), SEQ_LEN)
    shards = shards_of(decoder, model(name), SEQ_LEN, ShardPlace())
    initialize(shards, seed=seed, layers=model(name).layers, rule=RULE)
    return {shard.name: shard.values.clone() for shard in shards}


def test_bits_are_those_of_splitmix64():
    # Published first outputs of splitmix64 with state 0, where output i is f(i x golden).
    index = torch.arange(1, 4)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [value % 2**64 for value in rng.bits(0, index).tolist()] == expected


def test_values_are_nearly_normal_and_differ_by_name_and_seed():
    index = torch.arange(200_000)
    values = rng.normal(rng.key(0, "a"), index, 0.02)
    assert abs(float(values.mean())) < 2e-4
    assert abs(float(values.std()) - 0.02) < 2e-4
    assert 0.25 < float((values.abs() > 0.02).float().mean()) < 0.36
    other = rng.normal(rng.key(1, "a"), index, 0.02)
    correlation = torch.corrcoef(torch.stack([values, other]))[0, 1]
    assert abs(float(correlation)) < 0.01


def test_every_cut_of_every_model_has_the_values_of_the_whole():
    for name in ("llama-tiny", "mpt-tiny"):
        truth = whole(name, seed=5)
        assert set(truth) == {tensor.name for tensor in tensors(model(name), SEQ_LEN)}
        for tp, shards in ((2, 3), (4, 1), (4, 5)):
            for rank in range(tp):
                for shard in range(shards):
                    check_cut(
                        name, truth, ShardPlace(tp=tp, tp_rank=rank, shards=shards, shard=shard)
                    )


def check_cut(name: str, truth: dict[str, torch.Tensor], place: ShardPlace) -> None:
    shape = model(name)
    decoder = Decoder(shape, SEQ_LEN)
    ranks = tuple(range(place.tp))
    group = Group(axis="tp", ranks=ranks, rank=place.tp_rank, handle=None)
    apply_tensor(decoder, shape, group, seq_len=SEQ_LEN, sequence=True)
    shards = shards_of(decoder, shape, SEQ_LEN, place)
    for param in decoder.parameters():  # stand in for FSDP: rows of this shard only
        each = -(-param.shape[0] // place.shards)
        param.data = param.data[place.shard * each : (place.shard + 1) * each]
    initialize(shards, seed=5, layers=shape.layers, rule=RULE)
    for shard in shards:
        rows, columns = slice(*shard.rect.rows), slice(*shard.rect.columns)
        want = truth[shard.name]
        assert torch.equal(shard.values, want[rows] if want.ndim == 1 else want[rows, columns])
