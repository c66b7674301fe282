"""The planner and a run store in a browser: an app over the same functions as the commands.

It reads; nothing that a browser sends is written anywhere, or names a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args

import fourfold
from fourfold.errors import UserError
from fourfold.escape import json_text, visible
from fourfold.page import document
from fourfold.page.guard import Guard, Served
from fourfold.page.plan import PLAN_SCRIPTS
from fourfold.page.planner import Planner, SupersededError, estimated_cpu_s, first_look
from fourfold.page.report import REPORT_SCRIPTS, report_data
from fourfold.page.turns import BusyError
from fourfold.spec import Cluster, ModelShape, catalog, check, texts, words
from fourfold.spec.codec import decode_value
from fourfold.spec.hf.shapes import shape_from_config
from fourfold.spec.layout import EXPERT_AXES
from fourfold.units import counted, number_from, three_digits
from fourfold.verbs.question import EXPORTED
from fourfold.verbs.requests import PlanRequest, ReportRequest, RunsRequest

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
View: TypeAlias = "Callable[[Request], Awaitable[Response]]"
# Fields of the form, read as the flags of 'plan' are; what is empty is left to the planner.
_FIELDS = (
    "gpus",
    "seq_len",
    "global_batch",
    "micro_batch",
    "max_nodes",
    "top",
    "cluster",
    "gpu",
    "network",
    "stack",
    "tokens",
    "price",
)
_POLICY = ("precision", "sharding", "recompute", "routing", "dispatcher", "imbalance")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # of 1,024, not of 1,5
_MOST_TEXT = 40_000  # letters of a config.json or a cluster file; a request has room for both


def plan_request(asked: Mapping[str, str]) -> PlanRequest:
    """What the form asks, checked: names of the catalogue only, never a path."""
    said = {name: text.strip() for name, text in asked.items() if text.strip()}
    given: dict[str, Any] = {
        name: _THOUSANDS.sub("", said[name]) for name in _FIELDS if name in said
    }
    for name in ("seq_len", "global_batch"):
        check.given(given.get(name), name.replace("_", " "))
    cluster, gpu = given.get("cluster"), given.get("gpu")
    check.that(
        not cluster or cluster in catalog.cluster_names(), "cluster", cluster, "unknown cluster"
    )
    check.that(not gpu or gpu in catalog.device_names(), "gpu", gpu, "unknown GPU")
    given |= {name: True for name in ("safe", "explore", "capacity") if name in said}
    if "cluster_file" in said:
        given |= {"cluster": _cluster(said["cluster_file"]), "gpu": None}
    axes = [f"{axis}{said[axis]}" for axis in EXPERT_AXES if axis in said]
    return PlanRequest(
        model=_model(asked),
        layout=" ".join([said.get("layout", ""), *axes]).strip(),
        policy={name: said[name] for name in _POLICY if name in said},
        where=tuple(said[name] for name in ("where",) if name in said),
        **given,
    )


def _cluster(text: str) -> Cluster:
    """The user's own, whose file comes as a text."""
    check.that(len(text) <= _MOST_TEXT, "cluster file", text, "is too long")
    data = texts.parse(text)
    device = data.get("device")
    if isinstance(device, str) and device not in catalog.device_names():
        raise UserError("unknown GPU", field="device", value=device)
    return catalog.cluster_from(data)


def _model(asked: Mapping[str, str]) -> ModelShape | str:
    config = asked.get("config", "").strip()
    if config:
        check.that(len(config) <= _MOST_TEXT, "config.json", config, "is too long")
        return shape_from_config(texts.parse_json(config), "config.json")
    name = asked.get("model", "").strip().lower()
    known = name in catalog.model_names()
    check.that(known, "model", name, "unknown model", "choose a preset or paste a config")
    return name


class Views:
    """What each address answers; work is done in threads, plans in processes of their own."""

    def __init__(self, settings: Served) -> None:
        self.settings, self.planner = settings, Planner()

    async def plan(self, request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import HTMLResponse, Response

        asked = dict(request.query_params)
        full = asked.pop("full", "") == "1"
        view = asked.pop("view", "")[:64]
        try:
            wanted = await run_in_threadpool(plan_request, asked)
            now = wanted if full else first_look(wanted)
            cost_s = await run_in_threadpool(estimated_cpu_s, now)
            client = request.client.host if request.client else ""
            data = await self.planner.plan(
                view, now, request.is_disconnected, client=client, cost_s=cost_s
            )
        except SupersededError:
            return Response(status_code=204)
        except UserError as error:
            is_page = request.headers.get("hx-request") == "true"
            status = 429 if isinstance(error, BusyError) else 422
            return HTMLResponse(message(error), status_code=200 if is_page else status)
        return HTMLResponse(plan_fragment(data | self.deadline(asked, data), wanted, full=full))

    @staticmethod
    def deadline(asked: Mapping[str, str], data: Mapping[str, Any]) -> dict[str, Any]:
        """What the first layout means for the days there are, in words."""
        if not asked.get("days", "").strip() or not data["rows"]:
            return {}
        days: float = decode_value(Annotated[float, number_from], asked["days"], "days")
        best = data["rows"][0]
        check.that(1e-3 <= days <= 1e6, "days", asked["days"], "must be from 0.001 to a million")
        if best["training_s"] is None:
            raise UserError("needs the tokens of the training", field="days")
        takes, late = best["training_s"] / 86400.0, best["training_s"] / 86400.0 > days
        slow = best["training_s_high"] / 86400.0
        need = math.ceil(data["gpus"] * takes / days / data["host_gpus"]) * data["host_gpus"]
        said = (
            f"{three_digits(takes)} days are more than the {days:g} there are: at this speed per "
            f"GPU it takes about {counted(need, 'GPU')}"
            if late
            else f"{three_digits(takes)} days are within the {days:g} there are"
            + (
                ""
                if slow <= days
                else f"; at the 80% interval's slow end {three_digits(slow)} are not"
            )
        )
        return {"deadline": said}

    def answer(self, make: Callable[[Served], T], response: Callable[[T], Response]) -> View:
        from starlette.concurrency import run_in_threadpool

        async def answer(request: Request) -> Response:
            return response(await run_in_threadpool(make, self.settings))

        return answer


def app(settings: Served) -> Starlette:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    def as_json(data: Mapping[str, Any]) -> Response:
        """With halves of characters written out, which no JSON carries over a network."""
        return Response(json_text(data, indent=None), media_type="application/json")

    views = Views(settings)
    pages = {"/": home_page} | ({"/runs": runs_page} if settings.runs else {})
    pages |= {"/train": train_page} if settings.train else {}
    data = {"/runs/state": runs_known, "/runs/data": runs_data} if settings.runs else {}
    data |= {"/train/data": train_data} if settings.train else {}
    routes = [Route("/plan", views.plan)]
    routes += [Route(path, views.answer(make, HTMLResponse)) for path, make in pages.items()]
    routes += [Route(path, views.answer(make, as_json)) for path, make in data.items()]

    async def refused(request: Request, error: Exception) -> Response:
        return HTMLResponse(message(error), status_code=422)

    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts, www_redirect=False),
        Middleware(Guard, settings=settings),
    ]
    return Starlette(routes=routes, exception_handlers={UserError: refused}, middleware=middleware)


def message(error: Exception) -> str:
    return f'<p class="warn" role="alert" id="problem">{escape(visible(str(error)))}</p>'


def plan_fragment(data: dict[str, Any], wanted: PlanRequest, *, full: bool) -> str:
    """What replaces the last answer: its data, for the charts, and whether more is coming."""
    from fourfold.page.run_details import plan_command

    block = document.data_block("plan-data", data | {"command": plan_command(wanted), "full": full})
    if full:
        return block
    return (
        f'{block}<p class="note" id="more" hx-get="/plan" hx-include="#form" hx-target="#result" '
        'hx-vals=\'{"full": "1"}\' hx-trigger="load" hx-sync="#form:replace">First look, without '
        "context parallelism and virtual stages; the whole search is running ...</p>"
    )


def _precisions() -> list[str]:
    """Return what the form offers: precisions, and fp8 by its kinds of scales."""
    scaled = [words.scaled_name("fp8", kind) for kind in words.SCALINGS if kind != "auto"]
    return [*words.PRECISIONS, *scaled, "nvfp4"]


def home_page(settings: Served) -> str:
    data = {
        "kind": "serve",
        "version": fourfold.__version__,
        "models": sorted(catalog.model_names()),
        "gpus": sorted(catalog.device_names()),
        "clusters": sorted(catalog.cluster_names()),
        "stacks": list(EXPORTED),
        "precisions": _precisions(),
        "recompute": [*words.RECOMPUTE, *words.MOE_RECOMPUTE],
        "dispatchers": list(get_args(words.Dispatcher))[1:],
        "routings": list(get_args(words.Routing)),
        "has_runs": bool(settings.runs),
        "has_train": bool(settings.train),
    }
    return document.document(
        title="fourfold: plan a layout",
        body=document.asset("serve.html"),
        data=data,
        scripts=("htmx.min.js", *PLAN_SCRIPTS[:-1], "serve.js"),
        connect=True,
    )


def runs_known(settings: Served) -> dict[str, Any]:
    """Changes whenever a run is added."""
    found = fourfold.runs(RunsRequest(runs=str(settings.runs)))
    newest = max((stored.summary.started_at for stored in found.runs), default="")
    return {"count": len(found.runs), "newest": newest}


def runs_data(settings: Served) -> dict[str, Any]:
    answer = fourfold.report(ReportRequest(runs=str(settings.runs)))
    return report_data(answer, title=f"{counted(len(answer.records), 'run')} of {settings.runs}")


def runs_page(settings: Served) -> str:
    data = runs_data(settings)
    return document.document(
        title=data["title"],
        body=document.asset("report.html"),
        data=data,
        scripts=(*REPORT_SCRIPTS, "live.js"),
        connect=True,
    )


def train_data(settings: Served) -> dict[str, Any]:
    shown = fourfold.show_training(str(settings.train))
    names = ("step", "loss", "lr", "step_s", "tokens_per_s", "grad_norm")
    return {
        "kind": "train",
        "title": f"Training in {settings.train}",
        "version": fourfold.__version__,
        "names": names,
        "points": [[getattr(point, name) for name in names] for point in shown.points],
    }


def train_page(settings: Served) -> str:
    return document.document(
        title=f"Training in {settings.train}",
        body=document.asset("train.html"),
        data=train_data(settings),
        scripts=("train.js",),
        connect=True,
    )
