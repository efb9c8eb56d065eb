"""A large group is called by a relay on each other node. If the relay ends, links are direct; no call runs twice."""

from __future__ import annotations

import os
import signal
import textwrap
import time
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

RANKS = 8
LARGE = "b'x' * (3 << 20)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pk.Site]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RLINF_ACTORS_RELAY_FROM", str(RANKS))
        with pk.site(tmp_path_factory.mktemp("site"), 2, 0, pk.SHORT) as made:
            yield made


@pytest.fixture(scope="module")
def driver(site: pk.Site) -> Iterator[pk.Driver]:
    """A driver with the group `g`, which is called by a relay until the last test of this file has stopped that."""
    with site.driver(site.hosts[0]) as made:
        made.ask(f"define({HELPERS!r})")
        made.ask(f"launch('g', {[1] * RANKS}, True)")
        yield made


HELPERS = textwrap.dedent(
    """
    import os, threading
    from rlinf_actors.errors import RlinfActorsError
    from rlinf_actors.net import relay_path
    from rlinf_actors.runtime.pending import PendingRequest
    from rlinf_actors.wire import frames

    def relayed(name):
        "The number of ranks of a group whose links go by a relay."
        return sum(peer.relay is not None for peer in group(name).control.group.peers)

    def relays():
        "The process ids of this driver's relays."
        groups = cluster.runtime.groups.all()
        return [made.states[0].pid for made in groups if made.name.startswith("relay@")]

    def forked():
        "What a call says in a forked child."
        end, begin = os.pipe()
        child = os.fork()
        if not child:
            try:
                text = repr(group("g").count().wait(30))
            except BaseException as error:
                text = type(error).__name__
            os.write(begin, text.encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(begin)
        with open(end) as pipe:
            return pipe.read()

    def burst(name, calls, pid):
        "Call all ranks, and kill a process in the middle; return what each call came to, None for a lost connection."
        made = []
        for n in range(calls):
            made.append(group(name).count())
            if n == calls // 2:
                os.kill(pid, 9)
        ends = []
        for result in made:
            try:
                ends.append(result.wait(30))
            except RlinfActorsError as error:
                assert type(error).__name__ == "ConnectionLostError", error
                ends.append(None)
        return ends

    def relay_has_read_all():
        "Wait until a relay, whose path has ended, has handled all that this driver had sent."
        (made,) = [made for made in cluster.runtime.groups.all() if made.name.startswith("relay@")]
        peer, answered = made.peers[0], threading.Event()
        pending = PendingRequest(lambda *_: answered.set(), print)
        peer.send(frames.Relayed(peer.open(pending)))
        return answered.wait(30)
    """
)


def stopped(pid: int) -> bool:
    """True if all threads of a process stand still: one on another processor goes on for a moment."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def test_large_group_is_called_by_a_relay(driver):
    assert driver.ask("relayed('g')") == RANKS
    for n in range(3):
        assert driver.ask("group('g').count().wait(30)") == [n + 1] * RANKS
    assert driver.ask(f"group('g').count({LARGE}).wait(30)") == [4] * RANKS
    assert driver.ask("group('g').execute_on(3).count().wait(30)") == [5]


def test_large_parts_without_keys_bypass_the_relay(driver):
    assert driver.ask("group('g').execute_on(2).same(b'y' * (40 << 20)).wait(30) == [b'y' * (40 << 20)]")
    peer = "group('g').control.group.peers[2]"
    assert driver.ask(f"{peer}.relay is not None and {peer}._bulk is not None")
    assert driver.ask("any(thread.name.startswith('rlinf-actors-bulk') for thread in threading.enumerate())")


def test_small_group_and_group_of_this_node_are_called_directly(driver):
    driver.ask(f"launch('few', {[1] * (RANKS - 1)})")
    driver.ask(f"launch('here', {[0] * RANKS})")
    assert driver.ask("relayed('few')") == driver.ask("relayed('here')") == 0
    assert driver.ask("len(relays())") == 1
    driver.ask("group('here').shutdown()")


def test_killed_rank_fails_its_call_and_its_successor_is_called_by_the_relay(driver):
    pids = driver.ask("group('g').pid().wait(30)")
    driver.ask("start('blocked', group('g').execute_on(2).block())")
    os.kill(pids[2], signal.SIGKILL)
    assert driver.fails("end('blocked')").kind == "WorkerDiedError"
    assert driver.ask("group('g').count().wait(30)") == [5, 5, 1, 6, 5, 5, 5, 5]
    assert driver.ask("relayed('g')") == RANKS


def test_added_ranks_are_called_by_the_relay(driver):
    assert driver.ask("group('g').add_ranks(NodePlacementStrategy([1, 1]))") == [RANKS, RANKS + 1]
    assert driver.ask("relayed('g')") == RANKS + 2
    assert driver.ask("group('g').count().wait(30)")[-3:] == [6, 1, 1]
    driver.ask("group('g').remove_ranks(8, 9)")


def test_forked_child_of_the_driver_does_not_disturb_the_relay(driver):
    driver.ask("start('before', group('g').count())")
    assert driver.ask("forked()") == "UsageError"
    assert driver.ask("end('before')")[-1] == 7
    assert driver.ask("group('g').count().wait(30)")[-1] == 8


def test_relay_outlives_a_restart_of_the_head(site, driver):
    site.kill_head()
    assert driver.ask("group('g').count().wait(30)")[-1] == 9
    assert len(driver.ask(f"launch('later', {[1] * RANKS})")) == RANKS
    assert driver.ask("relayed('later')") == RANKS
    assert driver.ask("len(relays())") == 1
    driver.ask("group('later').shutdown()")
    assert driver.ask("group('g').count().wait(30)")[-1] == 10


def test_killed_relay_loses_no_call_without_a_word_and_none_runs_twice(site):
    calls = 30
    with site.driver(site.hosts[0]) as driver:
        driver.ask(f"define({HELPERS!r})")
        driver.ask(f"launch('h', {[1] * RANKS})")
        (relay,) = driver.ask("relays()")
        ends = driver.ask(f"burst('h', {calls}, {relay})")
        assert None in ends
        after = driver.ask("group('h').count().wait(30)")
        assert driver.ask("relayed('h')") == 0
    answered = [end for end in ends if end is not None]
    for rank in range(RANKS):
        counts = [end[rank] for end in answered]
        assert counts == sorted(set(counts)), "a rank ran a call twice, or in another order"
        assert len(counts) <= after[rank] - 1 <= calls


def test_stopped_relay_is_given_up_and_what_it_held_is_dropped(driver):
    """The last test: a path that has ended is not replaced."""
    driver.ask("setattr(relay_path, 'ASK_S', 0.5), setattr(relay_path, 'SILENT_S', 1.0)")
    (relay,) = driver.ask("relays()")
    os.kill(relay, signal.SIGSTOP)
    while not stopped(relay):
        time.sleep(0.01)
    try:
        driver.ask("start('open', group('g').count())")
        assert driver.ask("group('few').count().wait(30)") == [1] * (RANKS - 1), (
            "ranks without a relay are not concerned"
        )
        assert driver.fails("end('open')").kind == "ConnectionLostError"
        assert driver.ask("group('g').count().wait(30)")[-1] == 11
        assert driver.ask("relayed('g')") == 0
    finally:
        os.kill(relay, signal.SIGCONT)
    assert driver.ask("relay_has_read_all()")
    assert driver.ask("group('g').count().wait(30)")[-1] == 12
