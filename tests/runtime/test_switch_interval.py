"""The interpreter's switch interval while a driver is connected."""

from __future__ import annotations

import sys

import pytest

from rlinf_actors.runtime import switch_interval


@pytest.fixture(autouse=True)
def interval():
    before = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval.PYTHONS_S)
    yield
    sys.setswitchinterval(before)


def test_pythons_interval_is_shortened_and_restored():
    switch_interval.shorten()
    assert sys.getswitchinterval() == pytest.approx(switch_interval.DRIVERS_S)
    switch_interval.shorten()
    switch_interval.restore()
    assert sys.getswitchinterval() == pytest.approx(switch_interval.PYTHONS_S)


def test_interval_of_the_user_stays():
    sys.setswitchinterval(0.002)
    switch_interval.shorten()
    assert sys.getswitchinterval() == pytest.approx(0.002)
    switch_interval.restore()
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_interval_that_the_user_sets_meanwhile_stays():
    switch_interval.shorten()
    sys.setswitchinterval(0.01)
    switch_interval.restore()
    assert sys.getswitchinterval() == pytest.approx(0.01)


def test_interval_of_the_user_that_is_ours_by_chance_stays():
    sys.setswitchinterval(switch_interval.DRIVERS_S)
    assert not switch_interval.shorten(), "so the Runtime does not restore it"
