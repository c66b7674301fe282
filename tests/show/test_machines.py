"""The page of a profile: what it says of the time in which it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.show.machines import profile_page
from tests.result.test_cpu_profile import profile


@pytest.mark.parametrize(("unsteady", "says"), [((0.1, 0.1, 0.1), False), ((0.1, 0.42, 0.1), True)])
def test_a_page_says_when_something_else_ran(unsteady: tuple[float, ...], says: bool) -> None:
    known = profile()
    points = zip(known.hosts, unsteady, strict=True)
    page = profile_page(replace(known, hosts=tuple(replace(p, unsteady=u) for p, u in points)))
    found = [part for part in page if isinstance(part, str) and "differed by 42%" in part]
    assert bool(found) == says
