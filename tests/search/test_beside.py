"""A second process beside this one: the same answer, whatever becomes of it."""

from __future__ import annotations

import operator
import os
import subprocess

import pytest

from fourfold import plan
from fourfold.errors import UserError
from fourfold.verbs import beside as side
from fourfold.verbs import plan as planning
from fourfold.verbs.requests import PlanRequest


def test_a_second_process_answers() -> None:
    with side.beside(os.getpid) as other:
        assert other() not in (0, os.getpid())


def test_what_a_second_process_cannot_do_is_done_here(monkeypatch) -> None:
    for child in ("raise SystemExit(3)", "print('hello')", ""):
        monkeypatch.setattr(side, "_CHILD", child)
        with side.beside(os.getpid) as other:
            assert other() == os.getpid()
    with side.beside(sorted, [2, 1], lambda: None) as other, pytest.raises(TypeError):
        other()  # neither pickled nor taken: the error is the function's own
    monkeypatch.setattr(side.sys, "executable", "/no/such/python")
    with side.beside(operator.add, 2, 3) as other:
        assert other() == 5


def test_no_process_is_left_behind(monkeypatch) -> None:
    begun = []
    real = subprocess.Popen

    def noted(*args, **kwargs):
        begun.append(real(*args, **kwargs))
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(UserError), side.beside(os.getpid):
        raise UserError("stopped")
    assert begun[0].returncode is not None


def test_a_plan_beside_is_the_plan(monkeypatch) -> None:
    sizes = {"gpus": 256, "seq_len": 4096, "global_batch": 256}
    request = PlanRequest(model="mixtral-8x7b", gpu="a100-80gb", layout="pp1 tp1", **sizes)
    begun = []
    real = planning.beside
    monkeypatch.setattr(planning, "beside", lambda *given: begun.append(given) or real(*given))
    answers = [plan(request, second_process=which) for which in (True, False)]
    assert len(begun) == 1  # only who asks for it gets a second process
    assert answers[0].engines == answers[1].engines
    assert {one.engine for one in answers[0].engines if one.row} >= {"megatron", "fourfold"}
