"""Connections between nodes are reset, as by a restarted firewall: both ends live, and no call hangs."""

from __future__ import annotations

import os
import subprocess
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
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pk.Site]:
    with pk.site(tmp_path_factory.mktemp("site"), 3, 0, pk.SHORT) as made:
        yield made


@pytest.fixture(scope="module")
def driver(site: pk.Site) -> Iterator[pk.Driver]:
    with site.driver(site.hosts[0]) as made:
        yield made


def reset(host: netns_kit.Host) -> None:
    """Reset all connections of a node's agentd and workers, in both directions."""
    done = subprocess.run(host.command(["ss", "-K", "-t", "state", "established"]), capture_output=True, text=True)
    assert "ESTAB" in done.stdout or len(done.stdout.splitlines()) > 1, done


def test_reset_fails_the_running_call_and_later_calls_succeed(site, driver, tmp_path):
    workers = driver.ask(f"launch('calls', [{A}, {B}])")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    driver.ask(f"start('read', group('calls').execute_on(0).read({str(pipe)!r}))")
    assert driver.ask("group('calls').execute_on(1).count().wait(30)") == [1]
    reset(site.hosts[A])
    told = driver.fails("end('read')")
    assert told.kind == "ConnectionLostError"
    assert "the connection to calls:0" in told.text
    pipe.write_text("what nobody waits for")
    assert driver.ask("group('calls').pid().wait(30)") == workers
    driver.ask("group('calls').shutdown()")
    pk.ended(workers)
    driver.ask(f"launch('more', [{A}, {B}])")
    assert driver.ask("group('more').count().wait(30)") == [1, 1]
    driver.ask("group('more').shutdown()")


def test_idempotent_call_is_repeated_over_the_new_connection(site, driver, tmp_path):
    driver.ask(f"launch('again', [{A}], True)")
    begun, go = (str(tmp_path / name) for name in ("begun", "go"))
    for pipe in (begun, go):
        os.mkfifo(pipe)
    driver.ask(f"start('count', group('again').with_retries(1).count_once_told({begun!r}, {go!r}))")
    with open(begun) as pipe:
        pipe.read()  # it runs
    under_way = "group('again').count()"
    driver.ask(f"start('plain', {under_way})")
    reset(site.hosts[A])
    assert driver.fails("end('plain')").kind == "ConnectionLostError"  # the driver knows of the reset
    with open(go, "w"):
        pass
    counted = driver.ask("end('count')")
    assert counted in ([2], [3]), "it ran twice; whether the other call arrived is not known"
    driver.ask("group('again').shutdown()")


def test_reset_ends_a_stream_at_both_ends(site, driver, tmp_path):
    driver.ask(f"launch('streams', [{A}])")
    os.mkfifo(tmp_path / "closed")
    closed = str(tmp_path / "closed")
    assert driver.ask(f"first('numbers', group('streams').numbers({closed!r}))") == [0, 1]
    reset(site.hosts[A])
    assert driver.fails("rest('numbers')").kind == "ConnectionLostError"
    with open(closed) as pipe:
        assert pipe.read() == "MainThread"
    assert driver.ask("group('streams').count().wait(30)") == [1]
    driver.ask("group('streams').shutdown()")


def test_reset_fails_a_receive_whose_message_may_be_lost(site, driver, tmp_path):
    driver.ask(f"launch('pair', [{A}, {B}])")
    driver.ask("start('first', group('pair').execute_on(1).take('pair', 0))")
    driver.ask("group('pair').execute_on(0).give('before', 'pair', 1).wait(30)")
    assert driver.ask("end('first')") == ["before"]
    driver.ask("start('recv', group('pair').execute_on(1).take('pair', 0))")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    driver.ask(f"start('read', group('pair').execute_on(0).read({str(pipe)!r}))")
    with open(pipe, "w") as said:  # once the worker reads
        reset(site.hosts[A])
        # the driver's connection is reset as well: what it asks before it has noticed would be under way, and end
        assert driver.fails("end('read')").kind == "ConnectionLostError"
        received = driver.fails("end('recv')")
        assert received.kind == "PeerDiedError"
        assert "a message may be missing" in received.text
        said.write("what nobody waits for")
    assert driver.ask("group('pair').count().wait(30)") == [1, 1]
    driver.ask("group('pair').shutdown()")
