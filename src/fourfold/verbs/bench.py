"""bench: measure one run and compare it with its prediction; every run is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.launch.campaign import Campaign
from fourfold.launch.permit import Permit, emulated, gpu_count, require_gpus
from fourfold.result.trace import trace_files, trace_path
from fourfold.search.legal import why_not
from fourfold.spec import check
from fourfold.spec.run import AnyRun, RunSpec, run_of
from fourfold.spec.site import Site, parse_assignments
from fourfold.spec.tokens import TokenInfo, read_info, require_fit
from fourfold.spec.words import OURS
from fourfold.verbs import Answer
from fourfold.verbs.engines import engine_template
from fourfold.verbs.machine import Predictor
from fourfold.verbs.run_requests import BenchRequest, Start
from fourfold.verbs.run_shown import RunShown, Trial
from fourfold.verbs.runs import TRIAL_TAG
from fourfold.verbs.sites import Submission, campaign_of, engine_predictor, site_of, submission

MOST_TRIALS = 6


@dataclass(frozen=True, slots=True)
class Benched(Answer):
    """Runs as they are stored; the JSON of one run is that run."""

    runs: tuple[RunShown, ...]

    @property
    def ok(self) -> bool:
        return all(run.run.outcome == "ok" for run in self.runs)

    def plain(self) -> dict[str, Any]:
        return self.runs[0].plain() if len(self.runs) == 1 else {"runs": self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        return [run.plain() for run in self.runs]


def described(
    run: AnyRun, *, ranks: int | None = None, is_ours: bool = True, site: Site | None = None
) -> RunSpec:
    """A RunSpec as it is. A run's table that does not say so is compiled if its `ranks` compute on
    GPUs of their own, by our engine; a split backward pass (zero-bubble) can't be."""
    spec = run_of(run)
    if isinstance(run, RunSpec):
        return spec
    policy = run.get("policy")
    if not is_ours or (isinstance(policy, Mapping) and "compile" in policy):
        return spec
    if spec.device == "cpu" or spec.policy.schedule == "zero-bubble":
        return spec
    has_gpus = site.ask_gpus != "no" if site else gpu_count() >= (ranks or spec.gpus)
    if not has_gpus:  # `auto` then computes on cores
        return spec
    return replace(spec, policy=replace(spec.policy, compile=True))


def permit_of(request: Start) -> Permit:
    return Permit(env=parse_assignments(request.env), oversubscribe=request.oversubscribe)


def warn_of_emulation(specs: Iterable[RunSpec], on_event: OnEvent) -> None:
    for note in {emulated(spec) for spec in specs} - {""}:
        on_event(Event(f"note: {note}"))


def bench(
    run: AnyRun, request: BenchRequest | None = None, *, on_event: OnEvent = ignore
) -> Benched:
    """Run and store it, once by each engine that is asked for; an illegal run is stored too, with
    its reasons."""
    request = request or BenchRequest()
    engines = asked_engines(request)
    if len(engines) > 1:  # one run for all: what is automatic is as our engine would have it
        run = described(run, is_ours=OURS in engines, site=site_of(request))
    alone = [replace(request, engine=name) for name in engines]
    return Benched(tuple(done for one in alone for done in _by_one_engine(run, one, on_event)))


def _by_one_engine(run: AnyRun, request: BenchRequest, on_event: OnEvent) -> list[RunShown]:
    campaign, known, spec = _prepared(run, request, on_event)
    spec, trials = choose_micro_batch(spec, campaign, known, on_event)
    refused = refusals(spec, known)
    if refused:
        on_event(Event(f"illegal: {refused}"))
        stored = [campaign.refuse(spec, refused).stored]
    else:
        with campaign.queued([spec] * request.repeat):
            stored = [campaign.run_new(spec) for _ in range(request.repeat)]
    return [RunShown.of(run, trials) for run in stored]


def asked_engines(request: BenchRequest) -> Sequence[str | None]:
    """Names of a list such as 'torchtitan-0.2,fourfold', each known before any of them runs."""
    if "," not in (request.engine or ""):
        return [request.engine]
    names = [name.strip() for name in str(request.engine).split(",")]
    once = len(set(names)) == len(names) and "" not in names
    check.that(once, "engine", request.engine, "must name each engine once")
    check.that(not request.stack, "stack", request.stack, "needs a single --engine")
    for name in names:
        if name != OURS:
            engine_template(name)
    return names


def submit_bench(run: AnyRun, request: BenchRequest, *, on_event: OnEvent = ignore) -> Submission:
    """Leave the runs to the site's scheduler; `bench` with the same run follows them. With
    `print_launch` nothing is submitted."""
    rule = "must be a single one for a run that nobody follows"
    check.that(len(asked_engines(request)) <= 1, "engine", request.engine, rule)
    campaign, known, spec = _prepared(run, request, on_event)
    if campaign.queue is None:
        raise UserError("needs a site", field="detach", hint="--on slurm or --on SITE")
    rule = "must be a number for a run that nobody follows"
    check.that(spec.batch.micro_batch, "micro_batch", "auto", rule)
    if refused := refusals(spec, known):
        raise UserError(f"is illegal: {refused}", field="layout", value=str(spec.layout))
    specs = [spec] * request.repeat
    if why := campaign.unsupported(spec):
        raise UserError(f"cannot run it: {why}", field="engine", value=request.engine)
    return submission(campaign.queue, specs, request)


def _prepared(
    run: AnyRun, request: BenchRequest, on_event: OnEvent
) -> tuple[Campaign, Predictor, RunSpec]:
    is_ours, known, permit = not request.engine, engine_predictor(request), permit_of(request)
    site = site_of(request)
    spec = described(run, is_ours=is_ours, site=site)
    options = (("probe_s", f"{request.probe_s:g}"),) if request.probe_s > 0 else ()
    if request.trace:
        alone = is_ours and request.repeat == 1
        check.that(alone, "trace", request.trace, "needs a single run by our own engine")
        path = trace_path(request.trace, spec.gpus)
        options += (("trace", str(path)),)
        if spec.gpus > 1:
            first, *_, last = trace_files(path, spec.gpus)
            on_event(Event(f"traces of the ranks: {first.name} to {last.name}"))
    campaign = campaign_of(request, known, permit, on_event, options)
    campaign.clear_up()
    _require_startable(spec, permit, is_here=is_ours and site is None)
    if is_ours:
        tokens_of(spec)
    too_large = "" if request.force else known.too_large(spec)
    rule = f"certainly does not fit: {too_large}"
    hint = "'fourfold plan' finds layouts that do; --force runs it anyway"
    check.that(not too_large, "model", spec.model.name, rule, hint)
    if is_ours and site is None:
        warn_of_emulation([spec], on_event)
    return campaign, known, spec


def refusals(spec: RunSpec, known: Predictor) -> str:
    """Why a run is illegal for its engine, in words; '' when it is not."""
    target = known.target(spec)
    return "; ".join(map(str, why_not(spec.model, spec.layout, spec.batch, spec.policy, target)))


def _require_startable(spec: RunSpec, permit: Permit, *, is_here: bool) -> None:
    """Where its ranks are is else for the template or the scheduler to say."""
    spec.batch.without_ramp()
    if is_here:
        require_gpus(spec.device, spec.gpus, hint="--set device=cpu")
    permit.require((spec,), ranks=spec.gpus if is_here else 1)


def tokens_of(spec: RunSpec) -> TokenInfo | None:
    """The run's token file, if it fits the model; None for synthetic tokens."""
    if not spec.data:
        return None
    info = read_info(spec.data)
    require_fit(info, name=spec.data, vocab=spec.model.vocab, seq_len=spec.batch.seq_len)
    return info


# Micro batch 'auto': the largest that fits, by prediction first, then by a few short trials. Every
# trial is a run of its own in fresh processes, so an out-of-memory ends it for all ranks alike.


def with_micro(spec: RunSpec, micro: int) -> RunSpec:
    return replace(spec, batch=replace(spec.batch, micro_batch=micro))


def legal_sizes(spec: RunSpec, known: Predictor) -> list[int]:
    """From one sequence to a rank's whole share, as far as the layout allows."""
    share = -(-spec.batch.global_batch // spec.layout.dp)
    return [micro for micro in range(1, share + 1) if not refusals(with_micro(spec, micro), known)]


def predicted_micro_batch(spec: RunSpec, known: Predictor) -> RunSpec:
    """A run of 'auto' with the size that prediction alone would take; others as they are."""
    sizes = [] if spec.batch.micro_batch else legal_sizes(spec, known)
    if not sizes:
        return spec
    return with_micro(spec, sizes[_first_guess(spec, sizes, known)])


def choose_micro_batch(
    spec: RunSpec, campaign: Campaign, known: Predictor, on_event: OnEvent
) -> tuple[RunSpec, tuple[Trial, ...]]:
    """The spec with its micro batch chosen, and the trials that chose it; they are stored too."""
    sizes = [] if spec.batch.micro_batch else legal_sizes(spec, known)
    if not sizes:
        return (spec if spec.batch.micro_batch else with_micro(spec, 1)), ()
    guess = _first_guess(spec, sizes, known)
    short = replace(spec, steps=1, warmup=1, settle=False, tag=TRIAL_TAG)

    def fits(size: int) -> bool:
        on_event(Event(f"trying micro batch {size}"))
        (done,) = campaign.run(with_micro(short, size))
        return done.outcome == "ok"

    best, trials = largest_fitting(sizes, guess, fits)
    tried = tuple(Trial(micro_batch=size, fits=good) for size, good in trials)
    return with_micro(spec, best or sizes[0]), tried


def _first_guess(spec: RunSpec, sizes: list[int], known: Predictor) -> int:
    """Place of the largest size whose predicted memory fits; the smallest when none does."""
    predictions = known.predictions([with_micro(spec, size) for size in sizes])
    return max((at for at, one in enumerate(predictions) if one.fits), default=0)


def largest_fitting(
    sizes: list[int], guess: int, fits: Callable[[int], bool]
) -> tuple[int | None, list[tuple[int, bool]]]:
    """(the largest size that ran, the trials). Starts at the guess and closes in by halves."""
    low, high = -1, len(sizes)  # low ran, high did not
    at = guess
    trials: list[tuple[int, bool]] = []
    while high - low > 1 and len(trials) < MOST_TRIALS:
        good = fits(sizes[at])
        trials.append((sizes[at], good))
        low, high = (at, high) if good else (low, at)
        at = (low + high) // 2
        if good and high == len(sizes):
            at = min(len(sizes) - 1, low + max(1, (len(sizes) - low) // 2))
        at = max(low + 1, min(high - 1, at))
    return (sizes[low] if low >= 0 else None), trials
