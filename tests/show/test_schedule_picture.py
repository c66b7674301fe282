"""Pictures of a pipeline: every action is there, in order, and names what it is."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from fourfold.cost.schedule import ChunkTimes, play, rank_actions
from fourfold.errors import UserError
from fourfold.show.schedule_picture import picture, title


def line(schedule: str, virtual: int, micros: int = 5, stages: int = 3):
    chunks = stages * virtual
    forward = np.ones((chunks, 1))
    times = ChunkTimes(
        forward=forward,
        backward=2 * forward,
        weights=forward,
        last=np.ones(1),
    )
    return play("m", schedule, times, stages=stages, virtual_stages=virtual, micros=micros)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 3)],
)
def test_a_page_shows_every_action_once_and_in_order(schedule, virtual):
    shown = line(schedule, virtual)
    page = picture(shown, "x.html").decode()
    boxes = re.findall(r'data-rank="(\d)" data-action="(\w) (\d+) (\d+)"', page)
    for rank in range(3):
        want = rank_actions(schedule, stages=3, virtual_stages=virtual, micros=5, rank=rank)
        got = [(k, int(c), int(m)) for r, k, c, m in boxes if int(r) == rank]
        assert got == [tuple(action) for action in want]
    assert "<script" not in page
    assert "http" not in page
    assert ("weight gradients" in page) == (schedule == "zero-bubble")


def test_the_title_says_the_bubble():
    """Fill and drain of 1F1B with equal stages: (p - 1) / (m + p - 1) of the time."""
    assert title(line("1f1b", 1, micros=6)).endswith("bubble 25.0%")
    # A third of it is left where weights wait.
    assert line("zero-bubble", 1, micros=6).bubble == pytest.approx(2 / 20)


@pytest.mark.parametrize("stages", [1, 3, 16])
@pytest.mark.parametrize("virtual", [1, 4])
def test_an_image_has_room_for_its_key(stages, virtual):
    """Matplotlib warns where axes or legend do not fit."""
    schedule = "interleaved" if virtual > 1 else "1f1b"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = picture(line(schedule, virtual, micros=16, stages=stages), "x.png")
    assert drawn.startswith(b"\x89PNG")


def test_an_image_and_what_cannot_be_drawn():
    assert picture(line("interleaved", 2), "x.PNG").startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"timeline .*\.html or \.png"):
        picture(line("1f1b", 1), "x.gif")
