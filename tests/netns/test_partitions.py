"""The network between nodes is cut: one way, both ways, by the plug; and healed, before and after the lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import netns_kit
import partition_kit as pk
import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

A, B = 1, 2
"""Ranks of the nodes beside the head's."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pk.Site]:
    with pk.site(tmp_path_factory.mktemp("site"), 3, 1) as made:
        yield made


@pytest.fixture(scope="module")
def driver(site: pk.Site) -> Iterator[pk.Driver]:
    """One on the head's host."""
    with site.driver(site.hosts[0]) as made:
        yield made


@pytest.mark.parametrize("how", pk.CUTS)
def test_a_node_that_is_cut_off_is_lost_ends_its_workers_and_comes_back(site, driver, how):
    workers = driver.ask(f"launch({how!r}, [{A}, {B}, {A}])")
    driver.ask(f"start('block', group({how!r}).execute_on(0).block())")
    with pk.cut(how, site.hosts[A], site.hosts[0]):
        lost = driver.fails("end('block')")
        assert lost.kind == "NodeLostError"
        assert f"{how}:0 is gone with its node" in lost.text
        assert "it was silent for 2 s" in lost.text
        pk.ended([workers[0], workers[2]])
        assert driver.ask(f"group({how!r}).execute_on(1).count().wait(30)") == [1]
    site.until("node_joined", node_id=site.until("node_lost")["node_id"])
    assert driver.fails(f"group({how!r}).execute_on(0).count().wait(30)").kind == "NodeLostError"
    driver.ask(f"group({how!r}).shutdown()")
    assert len(driver.ask(f"launch({how!r}, [{A}, {B}, {A}])")) == 3  # a rank that ran still would refuse its second
    driver.ask(f"group({how!r}).shutdown()")


@pytest.mark.parametrize("how", pk.CUTS)
def test_a_cut_that_heals_before_the_lease_loses_nothing(site, driver, how):
    name = f"healed-{how}"
    workers = driver.ask(f"launch({name!r}, [{A}, {B}])")
    driver.ask(f"start('wait', group({name!r}).execute_on(1).take({name!r}, 0))")
    with pk.cut(how, site.hosts[A], site.hosts[0]):
        for n in range(5):
            driver.ask(f"start({n}, group({name!r}).execute_on(0).count(bytes(100_000)))")
        driver.ask(f"start('give', group({name!r}).execute_on(0).give('said into the cut', {name!r}, 1))")
        site.until("node_suspect")
    site.until("node_heard")
    assert [driver.ask(f"end({n})") for n in range(5)] == [[1], [2], [3], [4], [5]]
    driver.ask("end('give')")
    assert driver.ask("end('wait')") == ["said into the cut"]
    assert driver.ask(f"group({name!r}).pid().wait(30)") == workers
    driver.ask(f"group({name!r}).shutdown()")
