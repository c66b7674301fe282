"""A run on cores has no kernels: which of the host's operators stand for them."""

from __future__ import annotations

import numpy as np

from fourfold.traces.events import PRODUCT_OPS, Ints, Trace
from fourfold.traces.parts import ATTENDS

# Autograd's frames around operators; their own time is dispatch.
_FRAME = "autograd::engine"
# An operator that computes this share of its time itself is a kernel with all that it calls.
_OWN_SHARE = 0.5


def find_kernel_ops(trace: Trace) -> Ints:
    """Return the places of operators that compute, none inside of another one: products, attention
    without products in it, operators that call no other, and those that spend more time themselves
    than in what they call.

    Layers are counted by their attention, so it must not be found by its times: on a busy machine
    it may be held up in what it calls.
    """
    ops, texts = trace.ops, trace.texts
    is_op = np.array(["::" in text and not text.startswith(_FRAME) for text in texts], bool)
    is_product = np.array([text in PRODUCT_OPS for text in texts], bool)
    is_attention = np.array([bool(ATTENDS.search(text)) for text in texts], bool) & is_op
    order = np.lexsort((-ops.end, ops.start, ops.thread))
    computes, multiplies, attends = (
        told[ops.name[order]].tolist() for told in (is_op, is_product, is_attention)
    )
    caller, own_s = _callers(ops.thread[order], ops.start[order], ops.end[order])
    calls = [False] * len(order)
    has_product, has_attention = list(multiplies), [False] * len(order)
    for at in range(len(order) - 1, -1, -1):  # what is called stands behind its caller
        if caller[at] >= 0:
            calls[caller[at]] = True
            has_product[caller[at]] |= has_product[at]
            has_attention[caller[at]] |= attends[at] or has_attention[at]
    least_s = (_OWN_SHARE * ops.seconds[order]).tolist()
    inside, taken = [False] * len(order), []
    for at, above in enumerate(caller):
        inside[at] = above >= 0 and inside[above]
        if inside[at] or not computes[at]:
            continue
        fused = attends[at] and not has_attention[at]
        own = (fused or own_s[at] > least_s[at]) and not has_product[at]
        if multiplies[at] or not calls[at] or own:
            inside[at] = True
            taken.append(at)
    places = order[np.array(taken, np.int64)]
    return places[np.argsort(ops.start[places], kind="stable")]


def _callers(thread: Ints, start: np.ndarray, end: np.ndarray) -> tuple[list[int], list[float]]:
    """Of operators by thread and start, callers first: (who calls each, -1: nobody; seconds in
    which none that it calls runs)."""
    threads, starts, ends = thread.tolist(), start.tolist(), end.tolist()
    own_s = (end - start).tolist()
    callers, open_ops = [], []
    for at, begin in enumerate(starts):
        while open_ops and (threads[open_ops[-1]] != threads[at] or ends[open_ops[-1]] <= begin):
            open_ops.pop()
        callers.append(open_ops[-1] if open_ops else -1)
        if open_ops:
            own_s[open_ops[-1]] -= ends[at] - begin
        open_ops.append(at)
    return callers, own_s
