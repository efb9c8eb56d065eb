"""The network between nodes is cut one way, both ways, or by the interface, and heals before or after the lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

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
"""Ranks of the nodes other than the head's."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[pk.Site]:
    timers = {} if request.config.getoption("default_timers") else pk.SHORT
    with pk.site(tmp_path_factory.mktemp("site"), 3, 1, timers) as made:
        yield made


@pytest.fixture(scope="module")
def driver(site: pk.Site) -> Iterator[pk.Driver]:
    """A driver on the head's host."""
    with site.driver(site.hosts[0]) as made:
        yield made


@pytest.mark.parametrize("how", pk.CUTS)
def test_cut_off_node_is_lost_ends_its_workers_and_returns(site, driver, how):
    workers = driver.ask(f"launch({how!r}, [{A}, {B}, {A}])")
    driver.ask(f"start('block', group({how!r}).execute_on(0).block())")
    with pk.cut(how, site.hosts[A], site.hosts[0]):
        lost = driver.fails("end('block')")
        assert lost.kind == "NodeLostError"
        assert f"{how}:0 is gone with its node" in lost.text
        assert "it was silent for " in lost.text
        pk.ended([workers[0], workers[2]])
        assert driver.ask(f"group({how!r}).execute_on(1).count().wait(30)") == [1]
    site.until("node_joined", node_id=site.until("node_lost")["node_id"])
    assert driver.fails(f"group({how!r}).execute_on(0).count().wait(30)").kind == "NodeLostError"
    driver.ask(f"group({how!r}).shutdown()")
    assert (
        len(driver.ask(f"launch({how!r}, [{A}, {B}, {A}])")) == 3
    )  # a still running rank would refuse a second process
    driver.ask(f"group({how!r}).shutdown()")


@pytest.mark.parametrize("how", pk.CUTS)
def test_cut_that_heals_before_the_lease_loses_no_worker_or_message(site, driver, how):
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


def test_messages_between_two_separated_nodes_fail(site, driver):
    driver.ask(f"launch('pair', [{A}, {B}])")
    driver.ask("start('first', group('pair').execute_on(1).take('pair', 0))")
    driver.ask("group('pair').execute_on(0).give('before', 'pair', 1).wait(30)")
    assert driver.ask("end('first')") == ["before"]
    driver.ask("start('recv', group('pair').execute_on(1).take('pair', 0))")
    with pk.cut("both", site.hosts[A], site.hosts[B]):
        received = driver.fails("end('recv')")
        assert received.kind == "PeerDiedError"
        assert "pair:0" in received.text
        assert "out of reach" in received.text
        assert driver.ask("group('pair').count().wait(30)") == [1, 1]  # the head and the driver reach both
    driver.ask("group('pair').shutdown()")


@pytest.mark.parametrize("how", ["towards", "back"])
def test_call_to_a_node_that_only_the_head_reaches_fails(site, how):
    away = site.hosts[3]
    with site.driver(away) as driver:
        driver.ask(f"launch('lone-{how}', [{A}])")
        driver.ask(f"start('block', group('lone-{how}').block())")
        with pk.cut(how, away, site.hosts[A]):
            told = driver.fails("end('block')")
        assert told.kind == "NodeLostError"
        assert "out of reach" in told.text
        assert "The head has not given it up" in told.text


@pytest.mark.parametrize("how", ["towards", "back"])
def test_cut_off_driver_and_its_peers_are_notified(site, how):
    away = site.hosts[3]
    with site.driver(away) as driver:
        workers = driver.ask(f"launch('cut-{how}', [{A}])")
        driver.ask(f"start('block', group('cut-{how}').block())")
        with pk.cut(how, away, site.hosts[0]):
            told = driver.fails("end('block')")
            assert told.kind == "NodeLostError"
            assert f"the head at tcp://{site.address} was silent for " in told.text
            assert "the network between here and there is cut" in told.text
            pk.ended(workers)
            assert "it was silent for " in site.until("driver_ended", pid=driver.process.pid)["text"]
        assert driver.fails(f"group('cut-{how}').count().wait(30)").text == told.text
        assert driver.fails("launch('another', [1])").text == told.text


def test_stalled_driver_that_was_declared_dead_gets_that_reason(site):
    with site.driver(site.hosts[3]) as driver:
        workers = driver.ask(f"launch('stopped', [{A}])")
        driver.ask("start('block', group('stopped').block())")
        os.kill(driver.process.pid, signal.SIGSTOP)
        site.until("driver_ended", pid=driver.process.pid)
        pk.ended(workers)
        os.kill(driver.process.pid, signal.SIGCONT)
        told = driver.fails("end('block')")
        assert told.kind == "NodeLostError"
        assert "the head has given up on this" in told.text
        assert "it was silent for " in told.text


def test_agent_stalled_beyond_its_lease_leaves_no_rank_running_twice(site, driver):
    workers = driver.ask(f"launch('still', [{A}])")
    driver.ask("start('block', group('still').block())")
    os.kill(site.agents[A].pid, signal.SIGSTOP)
    try:
        assert driver.fails("end('block')").kind == "NodeLostError"
    finally:
        os.kill(site.agents[A].pid, signal.SIGCONT)
    pk.ended(workers)
    while "was declared lost after" not in site.until("refused")["text"]:
        pass  # an event of an earlier test
    site.until("node_joined")
    driver.ask("group('still').shutdown()")
    driver.ask(f"launch('still', [{A}])")
    driver.ask("group('still').shutdown()")
