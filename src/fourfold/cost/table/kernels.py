"""Which kernels a row's run used: formats, attention, fused or compiled, overlapped."""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.run import has_newer_flash, is_eager, stack_facts
from fourfold.cost.scaling import scaling_facts
from fourfold.cost.stacks import StackDefaults
from fourfold.cost.table.reference import Distinct, Draft, NoteWords
from fourfold.spec.catalog import generation_of
from fourfold.spec.words import PRICED_ATTENTION


def attention(draft: Draft, words: Distinct[NoteWords], stack: Distinct[StackDefaults]) -> Floats:
    flash, flash1, flash2 = (PRICED_ATTENTION.index(w) for w in ("flash", "flash1", "flash2"))
    kinds = choice(draft, "attention", PRICED_ATTENTION, "flash")
    newer = Distinct(draft.table.column("hardware"), has_newer_flash).mask(bool)
    third = Distinct(draft.table.column("attention"), str).mask(lambda cell: cell == "flash3")
    second = (kinds == flash2) | ((kinds == flash) & stack.mask(lambda s: s.flash2) & ~third)
    kinds = np.where(second, np.where(newer, flash2, flash), kinds)
    unfused, fused = (PRICED_ATTENTION.index(w) for w in ("unfused", "fused-softmax"))
    fuses = (kinds == unfused) & stack.mask(lambda s: s.fuses_softmax)
    kinds = np.where(fuses, float(fused), kinds)
    first = words.mask(lambda w: w.flash1) & np.isin(kinds, (flash, flash2))
    return np.where(first, float(flash1), kinds)


def kernels(draft: Draft, words: Distinct[NoteWords], stack: Distinct[StackDefaults]) -> None:
    """Overlap, launches and scales: what a note says, else what the stack does."""
    facts, table = draft.facts, draft.table
    for name in stack_facts(StackDefaults()):
        facts[name] = stack.array(lambda s, name=name: stack_facts(s)[name])
    stated = words.array(lambda w: -1.0 if w.compiled is None else w.compiled)
    compiled = np.where(stated < 0, stack.array(lambda s: s.compiled), stated)
    with_loss = compiled * stack.array(lambda s: s.compiles_loss)
    facts |= {"compiled": compiled, "compiled_loss": with_loss}
    apart = stack.array(lambda s: is_eager(s, compiled=True))
    facts["eager"] = np.where(
        compiled > 0, apart, stack.array(lambda s: is_eager(s, compiled=False))
    )
    facts["fused_host"] = np.maximum(compiled, words.array(lambda w: 2.0 * w.graphs))
    facts["split_inputs"] = words.array(lambda w: w.split_inputs)
    named = list(zip(table.column("note"), table.column("hardware"), strict=True))
    scaled = Distinct(named, lambda n: scaling_facts(NoteWords(n[0]).scaling, generation_of(n[1])))
    for name in ("cast_bytes", "scaled_rate"):
        facts[name] = scaled.array(lambda one, name=name: one[name])
    overlaps = words.mask(lambda w: not w.no_overlap)
    facts["overlap_dp"] = stack.array(lambda s: s.overlap_dp) * overlaps
    stated = words.array(lambda w: -1.0 if w.async_tp is None else w.async_tp)
    usual_tp = stack.array(lambda s: s.overlap_tp) * overlaps * (facts["sp"] > 0)
    facts["overlap_tp"] = np.where(stated < 0, usual_tp, stated)


def choice(draft: Draft, column: str, words: tuple[str, ...], blank: str) -> Floats:
    index = {word: float(i) for i, word in enumerate(words)}
    index[""] = index[blank]
    if column == "precision":
        index |= {"bf16-mixed": index["bf16"], "bf16-pure": index["bf16"]}
    if column == "attention":
        # The published tables say "fused" of Megatron's fused softmax.
        index |= {"fused": index["fused-softmax"], "flash3": index["flash"]}
    values = np.array([index.get(cell, -1.0) for cell in draft.table.column(column)])
    draft.refuse(values < 0, f"{column} is not one of {', '.join(words)}")
    return np.maximum(values, 0.0)
