"""How far an engine is from the reference, and the name of the difference: which weights, by which
factor of which axis, in which layer it begins, what the norm leaves out, which copies differ."""

from __future__ import annotations

import collections
import itertools
import math
import re

from torch import Tensor

# Rounding of fp32 stays below the first; above the second is a fault; between them nothing is said.
EQUAL, FAULT = 1e-5, 1e-4
# Adam makes a whole step of a small gradient either way.
PARAMETERS = 1e-3
EXACT_NORM = 1e-6
EXACT = 1e-3  # a gradient this close to a multiple of the right one is that multiple

Gaps = dict[str, float]
EXPERTS = ("egate", "eup", "edown")  # stacked: [experts, outputs, inputs]
_GROUPS = ("TP", "CP", "EP", "ETP", "DP")  # axes that a gradient is summed over
ROUTER_STATE = {"choice_bias": "bias", "load": "load"}


def differences(have: dict[str, Tensor], want: dict[str, Tensor]) -> Gaps:
    """Largest difference of each weight relative to its largest value, worst first; a weight whose
    values are all small is measured against the largest of all."""
    floor = 1e-3 * max(float(value.abs().max()) for value in want.values())
    gaps = {}
    for name, right in want.items():
        if name not in have:
            gaps[name] = math.inf
            continue
        gap = float((have[name] - right).abs().max()) / max(float(right.abs().max()), floor)
        gaps[name] = gap if math.isfinite(gap) else math.inf
    return dict(sorted(gaps.items(), key=lambda item: -item[1]))


def relative(have: list[float], want: list[float]) -> float:
    gaps = [abs(a / b - 1) for a, b in zip(have, want, strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def multiple(have: Tensor, want: Tensor) -> tuple[float, float]:
    """The number c for which have = c want fits best, and what it leaves."""
    a, b = have.flatten(), want.flatten()
    c = float(a @ b / (b @ b).clamp_min(1e-300))
    return c, float((a - c * b).norm() / a.norm().clamp_min(1e-300))


def kind(name: str) -> str:
    return re.sub(r"^\d+\.", "", name)


def factor_name(c: float, degrees: dict[str, int]) -> str:
    """2.0 is 'x EP' where ep is 2. Axes of one size can't be told apart: all are named."""
    sizes: dict[int, list[str]] = collections.defaultdict(list)
    for axis, size in degrees.items():
        sizes[size].append(axis)
    for (a, m), (b, n) in itertools.combinations(degrees.items(), 2):
        if "targets" not in (a + b) and m > 1 and n > 1 and m * n not in sizes:
            sizes[m * n].append(f"{a} x {b}")
    for size, axes in sorted(sizes.items()):
        if size > 1 and abs(c / size - 1) < EXACT:
            return f"x {' or '.join(axes)} ({size})"
        if size > 1 and abs(c * size - 1) < EXACT:
            return f"/ {' or '.join(axes)} ({size})"
    return f"x {c:.4g}"


def who(kinds: list[str], every: set[str]) -> str:
    classes = {
        "every weight": every,
        "the experts": {*EXPERTS},
        "the shared experts": {"sgate", "sup", "sdown"},
        "the router": {"router"},
        "the routers' state": {*ROUTER_STATE},
        "embedding and head": {"embed", "head"},
        "the embedding": {"embed"},
        "the norms": {name for name in every if "norm" in name},
        "attention": {"q", "k", "v", "o"},
    }
    for words, members in classes.items():
        if members & every == {*kinds}:
            return words
    return ", ".join(sorted(kinds))


def of_gradients(have: dict[str, Tensor], want: dict[str, Tensor], degrees: dict) -> list[str]:
    gaps = differences(have, want)
    by_factor: dict[str, list[str]] = collections.defaultdict(list)
    off: dict[str, float] = {}
    every = {kind(name) for name in want}
    for one in sorted(every):
        wrong = {name: gap for name, gap in gaps.items() if kind(name) == one and gap > FAULT}
        texts = {_factor(have.get(name), want[name], degrees) for name in wrong}
        if len(texts) == 1 and "" not in texts:
            by_factor[texts.pop()].append(one)
        elif wrong:
            off[one] = max(wrong.values())
    if len(off) > 3:  # one fault, carried down by the backward pass
        return [begins(gaps)]
    lines = [f"gradients of {who(kinds, every)} {text}" for text, kinds in by_factor.items()]
    if off:
        lines.append(f"gradients of {who([*off], every)} off by up to {max(off.values()):.2g}")
    return lines


def _factor(have: Tensor | None, want: Tensor, degrees: dict[str, int]) -> str:
    if have is None:
        return "are on no rank"
    c, left = multiple(have, want)
    if left < EXACT:
        return factor_name(c, degrees)
    size = next((size for axis, size in degrees.items() if axis.lower() == "ep"), 1)
    if want.dim() == 3 and size > 1 and want.shape[0] % size == 0:
        mixed = want.unflatten(0, (size, -1)).sum(0).repeat(size, 1, 1)
        if float((have - mixed).abs().max()) < EXACT * float(mixed.abs().max()):
            return f"are sums over ep ({size}), each of different experts"
    return ""


def begins(gaps: Gaps) -> str:
    """Backward goes from the last layer to the first: where it goes wrong, and what is right."""

    def layer(name: str) -> int:
        return int(name.split(".")[0]) if "." in name else -1

    wrong = {name: gap for name, gap in gaps.items() if gap > FAULT}
    top = max(map(layer, wrong))
    here = {kind(name): gap for name, gap in wrong.items() if layer(name) == top}
    worst = max(here, key=here.__getitem__)
    right = sorted(kind(name) for name in gaps if layer(name) == top and name not in wrong)
    below = [name for name in gaps if layer(name) < top and name not in wrong]
    below = [name for name in below if name not in ("norm", "head")]
    where = f"layer {top}" if top >= 0 else "the embedding or the head"
    return (
        f"gradients go wrong in {where} (worst {worst}, by {here[worst]:.2g}; right there: "
        f"{', '.join(right) or 'nothing'}); below it {'some are right' if below else 'all are off'}"
    )


def of_norm(norm: float, grads: dict[str, Tensor], degrees: dict[str, int]) -> str:
    """Which weights a norm leaves out, counts several times, or has only a part of; '' if none."""
    squares: dict[str, float] = collections.defaultdict(float)
    for name, value in grads.items():
        squares[kind(name)] += float(value.pow(2).sum())
    total, kinds, axes = sum(squares.values()), sorted(squares), degrees.items()
    shares = {"left out": 0.0}
    for size in {size for axis, size in axes if size > 1 and axis != "targets"}:
        named = " or ".join(axis for axis, other in axes if other == size and axis != "targets")
        shares |= {f"counted {named} ({size}) times": float(size), f"/ {named} ({size})": 1 / size}
    sets = [("experts", [k for k in kinds if k in EXPERTS])]
    sets += [("norms", [k for k in kinds if "norm" in k]), ("every weight", kinds)]
    sets += [
        (" and ".join(c), list(c)) for n in (1, 2, 3) for c in itertools.combinations(kinds, n)
    ]
    for words, some in sets:
        held = sum(squares[one] for one in some)
        for text, share in shares.items():
            if held and abs(math.sqrt(max(total + (share - 1) * held, 0)) / norm - 1) < EXACT_NORM:
                return f"{words} {text}"
    for words, some in sets[:2] + sets[3 : 3 + len(kinds)]:
        for axis, size in ((a, s) for a, s in axes if s > 1 and a != "targets"):
            for dim in (0, 1):
                lost = sum(_lost(v, size, dim) for k, v in grads.items() if kind(k) in some)
                if lost and abs(math.sqrt(max(total - lost, 0)) / norm - 1) < EXACT_NORM:
                    return f"only {axis} rank 0's part of {words} counted"
    return ""


def _lost(value: Tensor, size: int, dim: int) -> float:
    """What all ranks but the first hold."""
    if value.dim() <= dim or value.shape[dim] % size:
        return 0.0
    return sum(float(part.pow(2).sum()) for part in value.chunk(size, dim)[1:])


def signature(got: dict, truth: dict, degrees: dict[str, int]) -> list[str]:
    """`got` is as `truth`, with `spread` and `spread_after`: by how much copies of weights differ
    in the first gradients and after the last step."""
    out = []
    loss = got["loss"][0] / truth["loss"][0]
    if not abs(loss - 1) <= FAULT:
        out.append(f"loss {factor_name(loss, degrees)}")
    out += _of_balance(got, truth, degrees)
    out += of_gradients(got["grad"], truth["grad"], degrees)
    own = math.sqrt(sum(float(value.pow(2).sum()) for value in got["grad"].values()))
    norm = got["norm"][0]
    if not abs(norm / own - 1) <= EQUAL:
        how = of_norm(norm, got["grad"], degrees) if 0 < norm < math.inf else "not a number"
        if norm and abs(got.get("held", 0.0) / norm - 1) <= EXACT_NORM:
            how = "only what the rank itself holds is counted"
        if how or not out:  # of wrong gradients whose copies differ no norm is the right one
            how = how or f"{norm / own:.6g} of the norm of its own gradients"
            out.append(f"norm {norm:.6g} instead of {truth['norm'][0]:.6g}: {how}")
    for moment, spread in (("gradient", got["spread"]), ("value after", got["spread_after"])):
        apart: dict[str, float] = {}
        for name, gap in spread.items():
            if not gap <= FAULT:
                apart[kind(name)] = max(gap, apart.get(kind(name), 0.0))
        if apart and not any("copies" in line for line in out):
            words, most = who(list(apart), {kind(n) for n in spread}), max(apart.values())
            out.append(f"copies of {words} differ in {moment} by up to {most:.2g}")
            out[-1] += _unsummed(got, truth, degrees) if moment == "gradient" else ""
    out += [] if out else _later(got, truth)
    return out


def _unsummed(got: dict, truth: dict, degrees: dict[str, int]) -> str:
    """Copies that are the parts of a sum, or of a mean, that was never taken."""
    lost: dict[str, list[str]] = collections.defaultdict(list)
    for name, (total, copies) in got.get("sums", {}).items():
        c, left = multiple(total, truth["grad"][name])
        times = round(c)  # every part is on so many ranks
        whole = times > 0 and left < EXACT and abs(c - times) < EXACT and copies % times == 0
        if whole and not got["spread"].get(name, 0.0) <= FAULT:
            what, size = ("average", copies) if times == copies else ("sum", copies // times)
            axes = [axis for axis, n in degrees.items() if n == size and axis in _GROUPS]
            lost[f"{what} over {' or '.join(axes) or 'ranks'} ({size})"].append(kind(name))
    every = {kind(name) for name in truth["grad"]}
    words = [f"of {who([*{*kinds}], every)} no {what}" for what, kinds in lost.items()]
    return f": {'; '.join(words)} was taken" if words else ""


def _of_balance(got: dict, truth: dict, degrees: dict[str, int]) -> list[str]:
    """What routers add to the loss of the first step."""
    have, want = (each.get("balance", [0.0])[0] for each in (got, truth))
    if not want or abs(have / want - 1) <= FAULT:
        return []
    return [f"the routers' losses {factor_name(have / want, degrees)}"]


def _of_idle(got: dict, truth: dict) -> list[str]:
    """Experts that no token chose: nothing but decay moves them, and all of them alike."""
    gaps = []
    for name, experts in truth.get("idle", {}).items():
        have, want = got["param"][name], truth["param"][name]
        size, gap = want.abs().max(), (have - want).abs().flatten(1).amax(1)
        idle = float(gap[experts].max() / size)
        gap[experts] = 0
        gaps.append((idle, float(gap.max() / size)))
    worst, others = (max(found) for found in zip(*gaps, strict=True)) if gaps else (0.0, 0.0)
    if worst <= 10 * max(EQUAL, others):
        return []
    return [f"after {len(got['loss'])} steps only experts without tokens off by up to {worst:.2g}"]


def _of_state(got: dict, truth: dict) -> list[str]:
    """How far routers' state moved in the first step, in multiples of how far it should."""
    out = []
    for leaf, words in ROUTER_STATE.items():
        names = [name for name in truth.get("start", {}) if kind(name) == leaf]
        moves = [
            multiple(got["moved"][name] - truth["start"][name], want - truth["start"][name])
            for name in names
            if float(((want := truth["moved"][name]) - truth["start"][name]).abs().max()) > 0
        ]
        if moves and all(left < EXACT and abs(c - 1) > EXACT for c, left in moves):
            out.append(f"the routers' {words} moved {moves[0][0]:.3g} times as far")
    return out


def _later(got: dict, truth: dict) -> list[str]:
    """The first step is right: what goes wrong after it."""
    out = [*_of_idle(got, truth), *_of_state(got, truth)]
    if out:
        return out
    gaps = differences(got["param"], truth["param"])
    wrong = {kind(name) for name, gap in gaps.items() if not gap <= PARAMETERS}
    if wrong:
        words = who(list(wrong), {kind(name) for name in gaps})
        out.append(f"after {len(got['loss'])} steps {words} off by up to {max(gaps.values()):.2g}")
    for what in ("loss", "norm"):
        gap = relative(got[what], truth[what])
        if not gap <= FAULT:
            out.append(f"{what} of a later step off by {gap:.2g}")
    return out


def figures(got: dict, truth: dict) -> dict:
    """The largest differences, and whether the fault would show in a training's own curves."""
    grads, params = (differences(got[what], truth[what]) for what in ("grad", "param"))
    found = {
        "loss": relative(got["loss"], truth["loss"]),
        "norm": relative(got["norm"], truth["norm"]),
        "grad": next(iter(grads.values())),
        "param": next(iter(params.values())),
        "copies": max([0.0, *got["spread"].values(), *got["spread_after"].values()]),
    }
    first = [relative(got[what][:1], truth[what][:1]) for what in ("loss", "norm")]
    later = max(found["loss"], found["norm"]) <= FAULT and found["param"] <= PARAMETERS
    found["equal"] = max(*first, found["grad"], found["copies"]) <= EQUAL and later
    found["hidden"] = found["loss"] < 0.01 and found["param"] < 0.1
    found["worst"] = next(iter(grads))
    return found
