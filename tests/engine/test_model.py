"""The model alone: sizes and names as counted, logits as an independent implementation's."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.cost.count.params import model_params, stage_layers, tensors
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.run import columns_of
from fourfold.engine.model.decoder import IGNORE, Decoder, Layer
from fourfold.engine.model.positions import alibi_slope, make_tables
from fourfold.engine.parallel.shards import InitRule, ShardPlace, initialize, published, shards_of
from fourfold.search.query import usual_cluster
from fourfold.spec.catalog import device, model, model_names, shape
from fourfold.spec.engine import engine_of
from fourfold.spec.model import ModelShape
from fourfold.spec.supported import not_run
from tests.specs import run_spec

SEQ_LEN = 64


def built(model_shape: ModelShape, *, fused: bool = True, seed: int = 3) -> Decoder:
    decoder = Decoder(model_shape, SEQ_LEN, fused=fused)
    shards = shards_of(decoder, model_shape, SEQ_LEN, ShardPlace())
    initialize(shards, seed=seed, layers=model_shape.layers, rule=InitRule(vector_std=0.1))
    return decoder


def logits(decoder: Decoder, model_shape: ModelShape, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1])
    tables = make_tables(model_shape, positions, range(model_shape.heads))
    return decoder(tokens, tables).detach()


# A rotation of a part of a head (Nemotron) has no parameters.
BUILT = [
    name
    for name in sorted(model_names())
    if not not_run(model(name), 1) or model(name).family == "nemotron"
]


@pytest.mark.parametrize(
    ("name", "fused"),
    [(name, True) for name in BUILT]
    + [
        pytest.param(name, False, marks=[] if name.endswith("-tiny") else pytest.mark.slow)
        for name in BUILT
    ],
)
def test_every_preset_has_the_counted_parameters_under_the_counted_names(name, fused):
    model_shape = model(name)
    seq_len = 2048
    with torch.device("meta"):
        decoder = Decoder(model_shape, seq_len, fused=fused)
    # What routers keep of the last batch is no parameter of the model.
    loads = model_shape.count_layers("experts") * model_shape.experts
    held = sum(p.numel() for p in decoder.parameters()) - loads
    assert held == model_params(model_shape, seq_len)
    counted = {tensor.name: tensor.shape[0] for tensor in tensors(model_shape, seq_len)}
    found = {name: rows for _, names in published(decoder) for name, rows in names}
    assert found == counted


def test_stages_together_have_every_parameter_once_and_the_tied_one_at_both_ends():
    model_shape = model("gpt-tiny")
    stages = stage_layers(model_shape, 3, SEQ_LEN)
    names: list[str] = []
    for layers in stages:
        decoder = Decoder(model_shape, SEQ_LEN, layers)
        names += [name for _, shards in published(decoder) for name, _ in shards]
    expected = [tensor.name for tensor in tensors(model_shape, SEQ_LEN)]
    assert sorted(names) == sorted([*expected, "embedding.weight"])


@pytest.mark.parametrize("name", ["llama-tiny", "mpt-tiny", "gpt-tiny"])
def test_fused_projections_and_loss_chunks_change_nothing_but_the_route(name):
    model_shape = model(name)
    tokens = torch.randint(0, model_shape.vocab, (2, 32), generator=torch.manual_seed(0))
    separate, fused = built(model_shape, fused=False), built(model_shape)
    torch.testing.assert_close(
        logits(separate, model_shape, tokens), logits(fused, model_shape, tokens)
    )
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    tables = make_tables(model_shape, torch.arange(32), range(model_shape.heads))
    whole = fused(tokens, tables, targets)
    fused.head.chunks = 5
    torch.testing.assert_close(fused(tokens, tables, targets), whole)
    expected = torch.nn.functional.cross_entropy(
        logits(separate, model_shape, tokens).flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(whole, expected)


class Narrow(TorchDispatchMode):
    """Names of operators that made something in fewer bits than fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.seen |= {f"{func} {leaf.dtype}"} if leaf.dtype != torch.float64 else set()
        return out


@pytest.mark.parametrize(
    "positions",
    [
        {"kind": "rope", "scaling": {"kind": "llama3", "factor": 8.0, "original_length": 16}},
        {"kind": "alibi"},
        {"kind": "learned", "length": 32},
    ],
    ids=["rope", "alibi", "learned"],
)
def test_nothing_of_an_fp64_model_goes_through_fewer_bits(positions):
    gated = {"ffn": 48, "kv_heads": 2} if positions["kind"] == "rope" else {}
    family = "llama" if gated else "gpt"
    model_shape = shape(
        family, layers=1, hidden=32, heads=4, vocab=40, positions=positions, **gated
    )
    decoder = built(model_shape).to(torch.float64)
    tokens = torch.randint(0, 40, (2, 32), generator=torch.manual_seed(0))
    with Narrow() as narrow:
        tables = make_tables(model_shape, torch.arange(32), range(4), torch.float64)
        decoder(tokens, tables, tokens.roll(-1, 1)).backward()
    assert not narrow.seen


def test_alibi_slopes_are_the_published_ones():
    assert [alibi_slope(i, 8) for i in range(8)] == [2.0**-i for i in range(1, 9)]
    twelve = [alibi_slope(i, 12) for i in range(12)]
    assert twelve[:8] == [2.0**-i for i in range(1, 9)]
    assert twelve[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


def test_logits_equal_transformers_bloom():
    """Not exported; models that are have their logits compared in test_hf_weights.py."""
    import transformers

    model_shape = shape(
        "gpt", layers=2, hidden=48, heads=6, vocab=97, embedding_norm=True,
        positions={"kind": "alibi"}, activation="gelu",
    )  # fmt: skip
    config = transformers.BloomConfig(
        hidden_size=48, n_layer=2, n_head=6, vocab_size=97, layer_norm_epsilon=model_shape.norm_eps
    )
    theirs = transformers.BloomForCausalLM(config).eval()
    for block in theirs.transformer.h:  # exact GELU, where BLOOM approximates by tanh
        block.mlp.gelu_impl = torch.nn.GELU()
    ours = built(model_shape, fused=False)
    state = dict(ours.named_parameters())
    names = {
        "embedding.weight": "word_embeddings.weight", "embedding_norm": "word_embeddings_layernorm",
        "layers.": "h.", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm", "attention.out": "self_attention.dense",
        "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h", "final_norm": "ln_f",
    }  # fmt: skip
    loaded = {}
    for name, value in state.items():
        if name.split(".")[-2] not in ("q", "k", "v"):
            for ours_, theirs_ in names.items():
                name = name.replace(ours_, theirs_)
            loaded[f"transformer.{name}"] = value
    for layer in range(2):
        for leaf in ("weight", "bias"):
            parts = [state[f"layers.{layer}.attention.{part}.{leaf}"] for part in "qkv"]
            # BLOOM interleaves q, k and v head by head.
            heads = torch.stack([p.unflatten(0, (6, 8)) for p in parts], dim=1).flatten(0, 2)
            loaded[f"transformer.h.{layer}.self_attention.query_key_value.{leaf}"] = heads
    theirs.load_state_dict(loaded | {"lm_head.weight": state["embedding.weight"]})
    tokens = torch.randint(0, model_shape.vocab, (2, SEQ_LEN), generator=torch.manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(logits(ours, model_shape, tokens), expected, rtol=1e-5, atol=1e-5)


def test_operations_of_the_cost_model_have_the_names_of_the_layers_modules():
    modules = {name for name, _ in Layer(model("llama-tiny"), 0, fused=True).named_modules()}
    spec = run_spec("llama-3.1-8b", "dp32 tp2", seq_len=8192, micro_batch=2, global_batch=544)
    cluster = usual_cluster(device("h100-80gb"), 64)
    c = columns_of([spec], cluster=cluster, engine=engine_of("megatron-lm-2025"))
    operations = list(decoder_layer(c, c.micro))
    named = {op.name.partition(",")[0] for op in operations if op.kind == "product"}
    assert named == {name for name in modules if name.count(".") == 1} & named
    assert {"attention_norm", "mlp_norm"} <= {op.name for op in operations} & modules
