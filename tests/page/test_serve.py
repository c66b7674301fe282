"""The app of `serve`: who may ask, what is answered, what is ended; and its views in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette")
pytest.importorskip("plotly")

import numpy as np

from fourfold import plan
from fourfold.errors import UserError
from fourfold.page import planner, turns
from fourfold.page.guard import Served
from fourfold.page.planner import Planner, SupersededError, estimated_cpu_s, first_look
from fourfold.page.run_details import layout_table, plan_command
from fourfold.page.serve import Views, app, home_page, plan_request
from fourfold.page.turns import SMALL_S, BusyError, QueuedCall, Turns
from fourfold.result.files import curve
from fourfold.result.files.store import Store
from fourfold.result.files.training_folder import TrainingFolder
from fourfold.spec import catalog, codec
from fourfold.spec.train import TrainSettings
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest
from tests.loops import awaited

from .reading import Axis
from .sample import fill, report, specs
from .serving import serving
from .test_report_page import violations

ASKED = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "gpus": "16", "seq_len": "8192",
         "global_batch": "128", "stack": "megatron"}  # fmt: skip
REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())
LARGE = PlanRequest(
    model="llama-3.1-70b", gpu="h100-80gb", gpus=512, seq_len=8192, global_batch=1024
)


def ask(served, path: str, query: dict | None = None, *, method: str = "GET", **headers: str):
    """(status, headers, text) of one request, without a network."""
    sent: list[dict] = []
    given = {"host": "127.0.0.1:8300", **{k.replace("_", "-"): v for k, v in headers.items()}}
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": b"",
        "root_path": "", "scheme": "http", "query_string": urlencode(query or {}).encode(),
        "headers": [(k.encode(), v.encode()) for k, v in given.items()],
        "server": ("127.0.0.1", 8300), "client": ("127.0.0.1", 1),
    }  # fmt: skip

    async def receive() -> dict:
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(event: dict) -> None:
        sent.append(event)

    awaited(served(scope, receive, send))
    names = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], names, b"".join(e.get("body", b"") for e in sent[1:]).decode()


@pytest.mark.parametrize("headers", REFUSED["elsewhere"])
def test_a_request_from_elsewhere_is_refused(headers: dict[str, str]) -> None:
    for path in ("/", "/plan", "/nothing"):
        assert ask(app(Served()), path, **headers)[0] == (400 if "host" in headers else 403)


def test_own_pages_may_ask_and_nothing_is_written() -> None:
    served = app(Served())
    for host in ("127.0.0.1:8300", "localhost:8300", "[::1]:8300"):
        assert ask(served, "/", host=host, origin=f"http://{host}")[0] == 200
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    link |= {"sec_fetch_dest": "document"}
    assert (ask(served, "/", **link)[0], ask(served, "/plan", **link)[0]) == (200, 403)
    assert {ask(served, "/plan", method=m)[0] for m in ("POST", "PUT", "DELETE")} == {403}
    status, headers, _ = ask(served, "/")
    assert (status, headers["x-frame-options"]) == (200, "DENY")
    assert ask(served, "/runs")[0] == 404  # no store was given


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(UserError, match="token"):
        Served(host="0.0.0.0")
    with pytest.raises(UserError, match="8 or more"):
        Served(token="a b; HttpOnly")
    served = app(Served(host="0.0.0.0", token="secret-token", names=("planner.example",)))
    assert ask(served, "/")[0] == 403
    assert ask(served, "/", {"token": "wrong"})[0] == 403
    status, headers, _ = ask(served, "/", {"token": "secret-token"}, host="planner.example:8300")
    assert status == 200
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=Strict" in headers["set-cookie"]
    assert ask(served, "/", cookie="token=secret-token")[0] == 200
    assert ask(served, "/", cookie="token=other")[0] == 403
    assert ask(served, "/", {"token": "secret-token"}, host="evil.example:8300")[0] == 400


@pytest.mark.parametrize(("change", "said"), REFUSED["bad"])
def test_a_bad_query_gets_a_clear_message(change: dict[str, str], said: str) -> None:
    status, _, text = ask(app(Served()), "/plan", {**ASKED, **change, "view": "bad"})
    assert status == 422
    assert said in text
    assert "Traceback" not in text
    assert text.startswith('<p class="warn" role="alert"')


def test_a_plan_comes_as_a_first_look_and_whole() -> None:
    served = app(Served())
    status, _, text = ask(served, "/plan", {**ASKED, "view": "a"})
    assert status == 200
    assert 'hx-get="/plan"' in text
    status, _, text = ask(served, "/plan", {**ASKED, "view": "a", "full": "1"})
    whole = json.loads(re.search(r'id="plan-data">(.*?)</script>', text)[1])
    assert whole["full"]
    assert "hx-get" not in text
    import fourfold

    best = fourfold.plan(plan_request(ASKED)).best
    assert whole["rows"][0]["step_s"] == best.step_s
    assert whole["command"] == (
        "fourfold plan --model llama-3.1-8b --gpus 16 --seq-len 8192 --global-batch 128 "
        "--gpu h100-80gb --stack megatron"
    )


def test_a_pasted_config_is_planned(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
             "rope_theta": 5e5, "rms_norm_eps": 1e-5, "hidden_act": "silu"}  # fmt: skip
    config = json.dumps({"model_type": "llama", **sizes})
    found = plan_request({**ASKED, "model": "", "config": config})
    assert not isinstance(found.model, str)
    assert (found.model.layers, found.model.name) == (16, "config.json")
    file, end, command = plan_command(found).partition("END\n")
    assert (end, "--model model.toml " in command) == ("END\n", True)
    (tmp_path / "model.toml").write_text(file.removeprefix("cat > model.toml <<'END'\n"))
    assert catalog.model(str(tmp_path / "model.toml")) == found.model


def test_an_own_cluster_tokens_price_and_days_are_asked_for() -> None:
    own = catalog.cluster("jean-zay")
    given = plan_request({**ASKED, "gpu": "", "cluster_file": codec.to_toml(own)})
    assert (given.cluster, given.gpu) == (own, None)
    assert "cluster.toml <<'END'" in plan_command(given)
    money = {"network": "1600Gbit/s", "tokens": "300B", "price": "2.5"}
    asked = plan_request({**ASKED, **money})
    assert "--network 200.0GB/s" in plan_command(asked)
    cluster = resolved(asked)[0].resolved.cluster
    assert (cluster.gpus, cluster.host_gpus) == (16, 8)
    assert cluster.links[-1].bytes_per_s == 1600e9 / 8 / 8
    racks = resolved(plan_request({**ASKED, **money, "gpu": "gb200", "gpus": "144"}))[
        0
    ].resolved.cluster
    assert [racks.host_gpus, *(link.ranks for link in racks.links)] == [4, 72, 144]
    assert (asked.tokens, asked.price) == (300 * 10**9, 2.5)
    for change, said in (
        ({"cluster_file": "gpus = 1"}, "missing"),
        ({"cluster_file": 'device = "/etc/passwd"'}, "unknown GPU"),
        ({"cluster_file": "["}, "TOML"),
        ({"network": "fast"}, "rate"),
        ({"tokens": "many"}, "number"),
        ({"price": "-1"}, "price"),
        ({"price": "1,5"}, "is not a number"),
    ):
        with pytest.raises(UserError, match=said):
            resolved(plan_request({**ASKED, **change}))
    row = {"training_s": 40 * 86400.0, "training_s_high": 48 * 86400.0}
    data = {"rows": [row], "gpus": 16, "host_gpus": 8}
    assert "about 24 GPUs" in Views.deadline({"days": "30"}, data)["deadline"]
    assert "48 are not" in Views.deadline({"days": "45"}, data)["deadline"]
    for days, said in (("1,5", "is not a number"), ("inf", "to a million"), ("5e-324", "0.001")):
        with pytest.raises(UserError, match=f"days {days} .*{said}"):
            Views.deadline({"days": days}, data)
    with pytest.raises(UserError, match="tokens"):
        Views.deadline({"days": "30"}, data | {"rows": [row | {"training_s": None}]})


def test_experts_are_asked_for_and_answered() -> None:
    asked = ASKED | {
        "model": "mixtral-8x7b", "seq_len": "4096", "layout": "pp1", "ep": "4", "etp": "2",
        "routing": "natural", "imbalance": "0.6", "capacity": "1",
    }  # fmt: skip
    request = plan_request(asked)
    assert layout_table(request.layout) == {"pp": 1, "ep": 4, "etp": 2}
    assert plan_command(request) == (
        "fourfold plan --model mixtral-8x7b --gpus 16 --pp 1 --ep 4 --etp 2 --seq-len 4096 "
        "--global-batch 128 --routing natural --imbalance 0.6 --gpu h100-80gb --stack megatron "
        "--capacity"
    )
    text = ask(app(Served()), "/plan", {**asked, "view": "a", "full": "1"})[2]
    data = json.loads(re.search(r'id="plan-data">(.*?)</script>', text)[1])
    first = data["rows"][0]
    assert "ep4 etp2" in first["name"]
    assert sum(first["exposed_s"].values()) == pytest.approx(first["step_s"])
    assert any("natural" in said and "--imbalance 0.6" in said for said in data["remarks"])
    assert [row[0] for row in data["capacities"][0]][:2] == ["capacity", "1.00"]
    page = ask(app(Served()), "/")[2]
    for part in first["exposed_s"]:  # each has a name and a colour in the charts
        assert re.search(rf'\b{part}: "[a-zA-Z]', page)
        assert re.search(rf'\b{part}: "#', page)
    open_s, fixed_s = (
        estimated_cpu_s(plan_request({**asked, "layout": "", "ep": ep, "gpus": "4096"}))
        for ep in ("", "4")
    )
    assert open_s > fixed_s


def test_the_first_look_keeps_what_is_asked_for() -> None:
    fixed = PlanRequest(
        model="llama-3.1-8b", seq_len=8192, global_batch=128, gpus=16, gpu="h100-80gb",
        layout="tp2 cp2", policy={"virtual_stages": 2},
    )  # fmt: skip
    assert first_look(fixed).layout == "tp2 cp2"
    assert first_look(fixed).policy["virtual_stages"] == 2
    other = first_look(plan_request({**ASKED, "layout": "tp2"}))
    assert (other.layout, other.policy["cp_kind"]) == ({"tp": 2, "cp": 1}, "ring")


async def here() -> bool:
    return False


async def left() -> bool:
    return True


def test_a_superseded_query_is_ended_and_others_go_on(monkeypatch) -> None:
    """The same view asks again; another client asks beside it; a third one leaves. Large ones take
    all places but the one that small questions have."""
    small = plan_request(ASKED)

    async def both() -> list:
        plans = Planner()
        plans.processes = 3
        first = asyncio.create_task(plans.plan("one", LARGE, here, cost_s=2 * SMALL_S))
        while not (plans.running and plans.running[0].process):
            await asyncio.sleep(0.01)
        old = plans.running[0].process
        large = [plans.plan(view, LARGE, left, cost_s=2 * SMALL_S) for view in ("two", "three")]
        leaving = [asyncio.create_task(one) for one in large]
        await asyncio.sleep(0)
        assert [len(plans.running), len(plans.waiting)] == [2, 1]
        found = await asyncio.gather(
            first, plans.plan("one", small, here), plans.plan("four", small, here), *leaving,
            return_exceptions=True,
        )  # fmt: skip
        return [*found, old.exitcode, [*plans.running, *plans.waiting]]

    first, again, other, *leaving, code, left_over = awaited(both())
    assert [type(one) for one in (first, *leaving)] == [SupersededError] * 3
    assert code == -9  # its process was ended, not awaited
    assert again["rows"]
    assert again["rows"] == other["rows"]
    assert left_over == []


def test_small_questions_come_first_and_each_client_has_its_share(monkeypatch) -> None:
    monkeypatch.setattr(turns, "MAX_WAITING_OF_CLIENT", 3)
    begun: list[str] = []

    async def answer(self, ticket, gone) -> None:
        begun.append(ticket.view)
        await asyncio.sleep(0.02)

    monkeypatch.setattr(Planner, "_answer", answer)

    async def ask_all() -> None:
        plans = Planner()
        plans.processes = 2
        cost_s = {"first": 0.2, "large": 20.0, "late": 20.0, "many-1": 0.2, "many-2": 0.2}
        cost_s |= {"other": 0.2}
        asked = [
            asyncio.create_task(
                plans.plan(view, LARGE, here, client=view.partition("-")[0], cost_s=cost)
            )
            for view, cost in cost_s.items()
        ]
        await asyncio.sleep(0)
        greedy = [QueuedCall(client="greedy", cost_s=0.2) for _ in range(4)]
        for call in greedy[:3]:
            plans.enter(call)
        with pytest.raises(BusyError, match="waiting"):
            plans.enter(greedy[3])
        for call in greedy[:3]:
            plans.waiting.remove(call)
        await asyncio.gather(*asked)

    awaited(ask_all())
    assert begun == ["first", "large", "many-1", "other", "many-2", "late"]


def test_a_newcomer_s_small_question_runs_before_large_ones() -> None:
    """200 questions of 2 s from 8 addresses wait; one of 0.2 s comes last."""

    async def ask_all() -> list[int]:
        queue: Turns[QueuedCall] = Turns(2)
        for number in range(200):
            queue.enter(QueuedCall(client=f"{number % 8}", cost_s=2.0))
        newcomer = QueuedCall(client="new", cost_s=0.2)
        queue.enter(newcomer)
        assert newcomer.turn.is_set()  # its place is kept
        second = QueuedCall(client="new", cost_s=0.2)
        queue.enter(second)
        queue.leave(queue.running[0])
        assert second.turn.is_set()
        return [len(queue.running), len(queue.waiting)]

    assert awaited(ask_all()) == [2, 199]


def test_a_large_question_does_not_wait_for_ever() -> None:
    async def ask_all() -> None:
        queue: Turns[QueuedCall] = Turns(2)
        queue.enter(QueuedCall(cost_s=0.2))
        large = QueuedCall(client="patient", cost_s=3.0)
        queue.waiting.append(large)
        small = [QueuedCall(cost_s=0.2) for _ in range(20)]
        large.due_s = asyncio.get_running_loop().time()
        for call in small:
            queue.enter(call)
        assert large.turn.is_set()

    awaited(ask_all())


def test_equal_questions_are_answered_once(monkeypatch) -> None:
    monkeypatch.setattr(planner, "MOST_KEPT", 2)
    begun: list[int] = []

    async def answer(self, ticket, gone) -> dict[str, int]:
        begun.append(ticket.request.gpus)
        await asyncio.sleep(0.01)
        return {"gpus": ticket.request.gpus}

    monkeypatch.setattr(Planner, "_answer", answer)

    async def ask_all() -> list[list[int]]:
        plans, seen = Planner(), []
        plans.processes = 1
        for sizes in ((8, 8, 16, 8), (16, 32, 64), (64, 32), (8,)):
            asked = [plans.plan(f"{i}", replace(LARGE, gpus=n), here) for i, n in enumerate(sizes)]
            assert [one["gpus"] for one in await asyncio.gather(*asked)] == [*sizes]
            seen.append(begun.copy())
            begun.clear()
        long = replace(LARGE, gpus=8, top=1000)
        assert await plans.plan("long", long, here) == await plans.plan("long", long, here)
        return [*seen, begun.copy()]

    # Two are kept, those asked for last; an answer of a thousand rows is not.
    assert awaited(ask_all()) == [[8, 16], [32, 64], [], [8], [8, 8]]


@pytest.mark.parametrize(
    "change",
    [{"gpus": "720720"}, {"max_nodes": "90000", "gpus": ""}],
)
def test_a_question_that_costs_too_much_is_refused(change: dict[str, str]) -> None:
    status, _, text = ask(app(Served()), "/plan", {**ASKED, **change, "full": "1", "view": "x"})
    assert status == 422
    assert "fix some axes" in text
    assert "fourfold plan --model llama-3.1-8b" in text


def test_a_process_that_takes_too_much_is_ended(monkeypatch) -> None:
    spent = SimpleNamespace(ended=False, request=plan_request(ASKED))
    assert "CPU seconds" in str(planner._ended(-signal.SIGXCPU, spent))
    assert "log says why" in str(planner._ended(1, spent))
    sent: list = []
    for_child = {"setrlimit": lambda *args: None, "RLIMIT_CPU": 0, "RLIMIT_DATA": 0}
    monkeypatch.setattr(planner, "resource", SimpleNamespace(**for_child))
    monkeypatch.setattr("fourfold.plan", lambda request: np.zeros(2**57))
    planner._work(SimpleNamespace(send=sent.append), plan_request(ASKED), False)
    assert not sent[0][0]
    assert "4 GiB" in sent[0][1]


@pytest.mark.slow
def test_a_first_look_takes_less_than_the_whole_answer() -> None:
    """llama-3.1-70b on 512 GPUs; CPU time of one run, the best of three, both in turn."""
    import fourfold

    whole = plan_request({**ASKED, "model": "llama-3.1-70b", "gpus": "512"})
    spent: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        for first in spent:
            begun = time.process_time()
            assert fourfold.plan(first_look(whole) if first else whole).best
            spent[first].append(time.process_time() - begun)
    assert min(spent[True]) < 0.8 * min(spent[False])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    """`fourfold serve` with a store and a training: its address, its folder. Before `view`, whose
    pages ask it until they are closed."""
    tmp_path = tmp_path_factory.mktemp("serve")
    fill(tmp_path / "runs", 4)
    folder = TrainingFolder(tmp_path / "out")
    folder.root.mkdir()
    folder.describe(specs(1)[0], TrainSettings(steps=50))
    folder.metrics.write_text(curve.lines([_point(step) for step in range(1, 6)]))
    words = ("--runs", str(tmp_path / "runs"), "--train", str(folder.root))
    with serving(*words) as address:
        yield address, tmp_path


def _point(step: int) -> curve.Point:
    return curve.Point(
        step=step, loss=11.0 - 0.1 * step, lr=1e-4, tokens=4096 * step, sequences=step,
        step_s=0.5, tokens_per_s=8192.0, grad_norm=1.0,
    )  # fmt: skip


def answered(shown, *, full: bool = True) -> None:
    shown.page.wait_for_selector("html[data-full=yes]" if full else "#plan-data", state="attached")
    shown.settled()


def test_the_planner_in_a_browser(server, view) -> None:
    address, _ = server
    start = f"{address}?{urlencode(ASKED)}"
    shown = view(start)
    page = shown.page
    answered(shown)
    assert shown.text("#answer").startswith("Run llama-3.1-8b on 16 x h100-80gb")
    before = shown.marks("steps")
    page.locator("#global_batch").fill("512")
    page.wait_for_function("() => F.plan.command.includes('512')")
    answered(shown)
    marks = shown.marks("steps")
    x = Axis(marks["xticks"])
    rows = page.evaluate("F.plan.rows")
    assert max(x.value(p[0]) for p in marks["points"]) == pytest.approx(
        max(row["step_s"] for row in rows), abs=1.5 * x.pixel
    )
    assert len(marks["errors"]) == len(rows)
    assert before["points"] != marks["points"]
    # A link that reproduces the view, and the command.
    link = shown.text("#again pre >> nth=1")
    assert "global_batch=512" in link
    assert page.url == link
    other = view(link)  # a second client
    answered(other)
    assert other.text("#answer") == shown.text("#answer")
    assert "--global-batch 512" in shown.text("#again pre >> nth=0")
    # What cannot be asked is said, and the page goes on.
    page.locator("#gpus").fill("x<b>")
    page.wait_for_selector("#problem:has-text('is not a number')")
    assert page.locator("#result b").count() == 0
    page.locator("#gpus").fill("32")
    page.wait_for_function("() => F.plan.command.includes('--gpus 32')")
    answered(shown)
    assert violations(page) == []


def test_a_store_grows_and_a_loss_falls_in_a_browser(server, view) -> None:
    address, folder = server
    shown = view(f"{address}runs")
    assert shown.text("#count") == "All 4 runs."
    store = Store(folder / "runs")
    for number, spec in enumerate(specs(7)[4:]):  # as a sweep adds them
        store.keep(report(spec, number))
    shown.page.wait_for_selector("#count:has-text('All 7 runs.')")
    assert len(shown.page.locator("#grid tbody tr").all()) == 7
    curves = view(f"{address}train")
    assert "step 5, loss 10.5" in curves.text("#about")
    with open(folder / "out" / "metrics.jsonl", "a") as stream:
        stream.write(curve.lines([_point(step) for step in range(6, 11)]))
    curves.page.wait_for_selector("#about:has-text('step 10, loss 10')")
    assert curves.marks("loss")["lines"] == 1


def test_a_stored_text_with_half_a_character_is_served(tmp_path) -> None:
    spec = replace(specs(1)[0], note="half \udce4 a character")
    Store(tmp_path / "runs").keep(report(spec, 0))
    served = app(Served(runs=str(tmp_path / "runs")))
    for path in ("/runs", "/runs/data", "/runs/state"):
        assert ask(served, path)[0] == 200
    assert "\\\\udce4" in ask(served, "/runs/data")[2]


@pytest.mark.parametrize("name", ["mxfp8", "fp8-blockwise", "fp8-cs", "nvfp4"])
def test_precision_by_the_fields_name_is_the_same_at_every_door(name: str, cli) -> None:
    """The form, the library (flat and in a table) and the command line."""
    asked = ASKED | {"gpu": "gb200" if name in ("mxfp8", "nvfp4") else "h100-80gb", "top": "1"}
    flat = {key: int(text) if text.isdigit() else text for key, text in asked.items()}
    layout = {"layout": "pp1 dp16 cp1 tp1"}
    form = plan(plan_request(asked | layout | {"precision": name}))
    table = plan(PlanRequest(**flat, **layout, policy={"precision": name}))
    flags = [word for key, text in asked.items() for word in (f"--{key.replace('_', '-')}", text)]
    printed = cli.json("plan", *flags, "--pp", "1", "--cp", "1", "--tp", "1", "--precision", name)
    assert form.best is not None
    assert form.precision == table.precision == printed["precision"]
    assert form.best.step_s == table.best.step_s == printed["ranked"][0]["step_s"]
    assert f'"{name.replace("fp8-blockwise", "fp8-block").replace("fp8-cs", "fp8-tensor")}"' in (
        home_page(Served())
    )
