"""RLinf's runners give the digits that they give on Ray. `python -m tests.rlinf.runner_programs` records those."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")
pytest.importorskip("omegaconf")

from tests.rlinf.runner_programs import PROGRAMS, differences, recorded, run_here

SOURCE = os.environ.get("RLINF_SRC", "")
SECONDS = 300
pytestmark = [
    pytest.mark.live,
    pytest.mark.torch,
    pytest.mark.timeout(SECONDS + 30),
    pytest.mark.skipif(not SOURCE, reason="RLINF_SRC names no checkout of RLinf"),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_runner_gives_the_digits_that_it_gives_on_ray(program):
    assert differences(recorded()[program], run_here(program, SOURCE, SECONDS)["digits"]) == []


def test_differences_name_the_place():
    assert differences({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2.1}]}) == ["digits.a[1].b: 2.0 and 2.1"]
    assert differences([1.0], [1.0 + 1e-9]) == []
    assert differences({"a": 1}, {"b": 1}) == ["digits: {'a': 1} and {'b': 1}"]
