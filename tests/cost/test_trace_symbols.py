"""Does a dimension get the symbol that gives its number, and no other?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cost.trace import symbols
from fourfold.cost.trace.layer import layer_spec
from fourfold.cost.trace.symbols import Symbols, stretched_sizes
from fourfold.spec import catalog
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec


def sizes(spec: RunSpec) -> dict[str, int]:
    model, layout = spec.model, spec.layout
    return {
        "tokens": spec.batch.seq_len, "hidden": model.hidden, "heads": model.heads,
        "kv_heads": model.kv_heads, "head_size": model.head_size, "ffn": model.ffn,
        "tp": layout.tp, "cp": layout.cp, "dp": layout.dp,
        "qkv_width": (model.heads + 2 * model.kv_heads) // layout.tp * model.head_size,
    }  # fmt: skip


def both(spec: RunSpec) -> tuple[dict[str, int], dict[str, int]]:
    return sizes(spec), sizes(stretched_sizes(spec))


def named(spec: RunSpec, *dims: str) -> list[str]:
    first, second = both(spec)
    pairs = [(symbols.whole(dim, first), symbols.whole(dim, second)) for dim in dims]
    return Symbols(first, second).of(pairs)


def test_equal_numbers_are_told_apart() -> None:
    """tokens / cp = hidden = 4096; kv_heads / tp = 2 = a pair; ffn / 2 = 2 ffn / tp."""
    spec = layer_spec(catalog.model("llama-3.1-8b"), 8192, Layout(tp=4, cp=2, shard=2))
    for dims in (
        ["tokens/cp", "hidden"],
        ["hidden", "tokens/cp"],
        ["2", "kv_heads/tp", "tokens/cp", "head_size"],
        ["tokens/cp", "2*ffn/tp"],
        ["tokens/cp/tp", "hidden"],
        ["heads/tp", "tokens/cp/2", "head_size/2"],
        ["qkv_width/dp/cp", "hidden"],
    ):
        assert named(spec, *dims) == dims


def test_half_of_the_tokens_is_no_part_of_tensor_parallelism() -> None:
    """With tp = 2 both have the same number in any count: who has heads is inside a block."""
    spec = layer_spec(catalog.model("llama-3.1-8b"), 8192, Layout(tp=2, cp=2))
    assert named(spec, "heads/tp", "tokens/cp/2", "head_size") == [
        "heads/tp", "tokens/cp/2", "head_size"
    ]  # fmt: skip
    assert named(spec, "tokens/cp/2", "hidden") == ["tokens/cp/tp", "hidden"]
    assert named(spec, "heads/tp", "tokens/cp/2") == ["heads/tp", "tokens/cp/2"]


def test_what_is_no_symbol_is_its_number() -> None:
    spec = layer_spec(catalog.model("llama-3.1-8b"), 8192, Layout(tp=4))
    first, second = both(spec)
    assert Symbols(first, second).of([(7, 7), (12345, 99999), (4096, 4096 * 13)]) == [
        "7", "12345", "hidden"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_symbol_gives_its_number_in_both_counts(kind: str, data: st.DataObject) -> None:
    tp, cp = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4]))
    spec = layer_spec(
        catalog.model(data.draw(st.sampled_from(["llama-3.1-8b", "mpt-7b", "gpt-3-175b"]))),
        tp * cp * 2 * data.draw(st.integers(1, 5000)),
        Layout(tp=tp, cp=cp, shard=data.draw(st.sampled_from([1, 2]))),
        cp_kind=kind,  # type: ignore[arg-type]
    )
    first, second = both(spec)
    texts = ("tokens", "tokens/cp", "tokens/cp/tp", "hidden", "heads/tp", "kv_heads/tp",
             "head_size", "ffn/tp", "2*ffn/tp", "qkv_width", "heads*head_size/tp")  # fmt: skip
    dims = data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=4))
    pairs = [(symbols.whole(dim, first), symbols.whole(dim, second)) for dim in dims]
    for text, pair in zip(Symbols(first, second).of(pairs), pairs, strict=True):
        assert (symbols.ratio(text, first), symbols.ratio(text, second)) == pair or text == str(
            pair[0]
        )
