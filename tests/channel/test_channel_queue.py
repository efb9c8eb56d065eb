"""The queue's decisions, one by one and then by a machine that tries what nobody thinks of."""

from __future__ import annotations

import itertools

import msgspec
import pace
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_commands import (
    AcceptPut,
    AcceptPuts,
    DeliverItems,
    QueuedItem,
    RefuseRequest,
    Ticket,
    one_by_one,
)

KEY = b"k"


class Kit:
    """Requests of two processes, named by numbers in order."""

    def __init__(self, maxsize: int = 0, max_bytes: int = 0) -> None:
        self.queue = ChannelQueue(maxsize, max_bytes)
        self.ids = itertools.count(1)

    def ticket(self, owner="a"):
        return Ticket(owner, owner.encode(), next(self.ids))

    def put(self, value, weight=0, nbytes=1, owner="a", key=KEY, nowait=False):
        ticket = self.ticket(owner)
        return ticket, said(self.queue.put(ticket, key, QueuedItem(value, nbytes, weight), nowait))

    def get(self, owner="a", key=KEY, nowait=False):
        ticket = self.ticket(owner)
        return ticket, said(self.queue.get(ticket, key, nowait))

    def batch(self, target, owner="a", key=KEY):
        ticket = self.ticket(owner)
        return ticket, said(self.queue.batch(ticket, key, target))


def said(commands):
    """Commands as short text: who is told what."""
    out = []
    for command in one_by_one(commands):
        if isinstance(command, DeliverItems):
            values = [f"{item.value}{'!' if item.again else ''}" for item in command.items]
            out.append((command.ticket.id, values))
        else:
            out.append((command.ticket.id, command.why if isinstance(command, RefuseRequest) else "in"))
    return out


def test_figures_count_what_waits_and_what_is_out():
    kit = Kit(maxsize=2)
    for value in range(4):
        kit.put(value)
    kit.get()
    kit.get(key=b"empty")
    found = kit.queue.figures()
    shown = {one.key: (one.items, one.puts_waiting, one.gets_waiting) for one in found.by_key}
    assert shown["b'empty'"] == (0, 0, 1), "bytes that are no key are shown as they are"
    assert sum(one.items for one in found.by_key) == found.items
    found = msgspec.structs.replace(found, by_key=[])
    assert (found.items, found.out, found.puts_waiting, found.gets_waiting) == (2, 1, 1, 1)
    assert (found.keys, found.entered, found.max_items, found.undeliverable) == (2, 3, 2, 0)
    assert found.size == kit.queue.nbytes > 0


def test_figures_name_a_waiting_worker_by_its_id_and_a_driver_by_its_incarnation():
    kit = Kit()
    kit.get("worker:1a")
    kit.get("worker:1a")
    kit.get("driver:2b")
    (key,) = kit.queue.figures({b"worker:1a": "g-0"}.get).by_key
    assert key.consumers == ["g-0", "2b"]


def test_bytes_of_a_key_are_counted_until_they_are_acknowledged():
    kit = Kit()
    for nbytes in (100, 10, 1):
        kit.put("a", nbytes=nbytes, key=b"a")
    kit.put("b", nbytes=7, key=b"b")
    size = lambda: {one.key: one.size for one in kit.queue.figures().by_key}  # noqa: E731
    ticket, _ = kit.get(key=b"a")
    assert size() == {"97": 111, "98": 7}
    kit.queue.ack(ticket)
    assert size() == {"97": 11, "98": 7}


def test_items_leave_in_the_order_they_came():
    kit = Kit()
    for n in range(3):
        assert kit.put(n)[1][0][1] == "in"
    assert [kit.get()[1][0][1] for _ in range(3)] == [["0"], ["1"], ["2"]]


def test_getters_are_served_in_their_order():
    kit = Kit()
    first, second = kit.get()[0], kit.get()[0]
    assert kit.put("x")[1][1:] == [(first.id, ["x"])]
    assert kit.put("y")[1][1:] == [(second.id, ["y"])]


def test_a_full_key_parks_puts_and_lets_them_in_one_by_one():
    kit = Kit(maxsize=1)
    kit.put("x")
    second, third = kit.put("y"), kit.put("z")
    assert second[1] == third[1] == []
    assert kit.queue.full(KEY)
    assert kit.get()[1] == [(4, ["x"]), (second[0].id, "in")]
    assert kit.queue.size(KEY) == 1
    assert kit.get()[1] == [(5, ["y"]), (third[0].id, "in")]


def test_nowait_refuses_on_either_side():
    kit = Kit(maxsize=1)
    assert kit.get(nowait=True)[1][0][1] == "empty"
    kit.put("x")
    assert kit.put("y", nowait=True)[1][0][1] == "full"
    assert kit.get(nowait=True)[1][0][1] == ["x"]
    assert kit.put("y", nowait=True)[1][0][1] == "in"


def test_a_full_key_does_not_block_another():
    kit = Kit(maxsize=1)
    kit.put("x")
    kit.put("y")
    assert kit.put("z", key=b"other")[1][0][1] == "in"
    assert not kit.queue.full(b"more")


def test_bytes_count_until_they_are_acknowledged_and_one_item_always_fits():
    kit = Kit(max_bytes=10)
    assert kit.put("big", nbytes=100)[1][0][1] == "in"
    waiting = kit.put("small", nbytes=1)[0]
    got, told = kit.get()
    assert told == [(got.id, ["big"])]
    assert said(kit.queue.ack(got)) == [(waiting.id, "in")]


def test_bytes_are_limited_over_all_keys_but_an_empty_key_takes_one_item():
    kit = Kit(max_bytes=10)
    kit.put("x", nbytes=10)
    assert kit.put("y", nbytes=5, key=b"other")[1][0][1] == "in"
    mine, other = kit.put("x2", nbytes=4)[0], kit.put("y2", nbytes=4, key=b"other")[0]
    assert said(kit.queue.ack(kit.get(key=b"other")[0])) == [(other.id, "in")]
    assert said(kit.queue.ack(kit.get()[0])) == [(mine.id, "in")]
    assert kit.queue.nbytes == 8


def test_freed_bytes_go_to_the_key_that_waits_longest():
    kit = Kit(max_bytes=15)
    for key in (b"a", b"a", b"c", b"b"):
        kit.put("x", nbytes=5, key=key)
    first, second = (kit.put("next", nbytes=5, key=key)[0] for key in (b"c", b"b"))
    assert said(kit.queue.ack(kit.get(key=b"a")[0])) == []
    assert said(kit.queue.ack(kit.get(key=b"a")[0])) == [(first.id, "in")]
    assert said(kit.queue.ack(kit.get(key=b"c")[0])) == [(second.id, "in")]


def test_a_queue_is_drained_when_closed_and_everything_is_acknowledged():
    kit = Kit()
    kit.put("x")
    kit.queue.close()
    got = kit.get()[0]
    assert not kit.queue.drained
    kit.queue.ack(got)
    assert kit.queue.drained


def test_a_key_is_dropped_when_empty_and_unused():
    kit = Kit()
    kit.put("x")
    got = kit.get()[0]
    assert kit.queue.in_use() == [KEY]
    kit.queue.ack(got)
    assert kit.queue.in_use() == []
    kit.get(nowait=True)
    assert kit.queue.in_use() == []
    waiting = kit.get()[0]
    kit.queue.cancel(waiting)
    assert kit.queue.in_use() == []


class TestBatch:
    def test_a_batch_takes_from_the_head_until_the_next_item_would_exceed(self):
        kit = Kit()
        for weight in (2, 2, 3):
            kit.put(f"w{weight}", weight)
        assert kit.batch(5)[1][0][1] == ["w2", "w2"]
        assert kit.get()[1][0][1] == ["w3"]

    def test_a_batch_is_complete_when_the_target_is_reached(self):
        kit = Kit()
        kit.put("x", 3)
        kit.put("y", 2)
        assert kit.batch(5)[1][0][1] == ["x", "y"]

    def test_a_batch_waits_while_there_is_less_and_makes_room_meanwhile(self):
        kit = Kit(maxsize=1)
        kit.put("x", 1)
        batch, told = kit.batch(3)
        assert told == []
        assert kit.put("y", 1)[1][0][1] == "in"
        assert kit.put("z", 1)[1][1:] == [(batch.id, ["x", "y", "z"])]

    def test_a_head_that_is_too_heavy_gives_nothing_and_stays(self):
        kit = Kit()
        kit.put("heavy", 9)
        assert kit.batch(5)[1][0][1] == []
        assert len(kit.queue._delivered) == 0
        assert kit.get()[1][0][1] == ["heavy"]

    def test_a_target_of_nothing_does_not_wait(self):
        assert Kit().batch(0)[1][0][1] == []

    def test_a_cancelled_batch_returns_its_items(self):
        kit = Kit()
        for name in "xyz":
            kit.put(name, 1)
        batch = kit.batch(5)[0]
        behind = kit.get()[0]
        assert said(kit.queue.cancel(batch)) == [(batch.id, "cancelled"), (behind.id, ["x"])]
        assert [item.value for item in kit.queue.waiting(KEY)] == ["y", "z"]

    def test_a_batch_stays_in_order_when_an_earlier_item_comes_back(self):
        kit = Kit()
        kit.put("x", 1)
        earlier = kit.get("b")[0]
        batch = kit.batch(2)[0]
        kit.put("y", 1)
        assert said(kit.queue.cancel(earlier, back=True)) == [(batch.id, ["x", "y"])]

    def test_getters_wait_behind_a_batch(self):
        kit = Kit()
        kit.put("x", 1)
        kit.batch(2)
        behind = kit.get()[0]
        kit.put("y", 1)
        assert kit.put("z", 1)[1][1:] == [(behind.id, ["z"])]

    def test_one_item_completes_several_batches(self):
        kit = Kit()
        first, second = kit.batch(1)[0], kit.batch(0.5)[0]
        assert kit.put("x", 1)[1][1:] == [(first.id, ["x"])]
        assert kit.put("y", 1)[1][1:] == [(second.id, [])]
        assert kit.queue.size(KEY) == 1


class TestGivingBack:
    def test_an_item_on_its_way_to_a_cancelled_get_is_first_again(self):
        kit = Kit()
        kit.put("x")
        kit.put("y")
        got = kit.get()[0]
        assert kit.queue.cancel(got, back=True) == []
        assert kit.get()[1][0][1] == ["x"]

    def test_a_cancelled_get_keeps_items_on_their_way_unless_they_are_wanted_back(self):
        kit = Kit()
        kit.put("x")
        got = kit.get()[0]
        assert kit.queue.cancel(got) == []
        assert len(kit.queue._delivered) == 1

    def test_acknowledged_items_do_not_come_back(self):
        kit = Kit()
        kit.put("x")
        got = kit.get()[0]
        kit.queue.ack(got)
        assert kit.queue.cancel(got, back=True) == kit.queue.owner_gone("a") == []
        assert kit.queue.size(KEY) == 0

    def test_a_dead_consumers_items_come_back_marked_and_in_order(self):
        kit = Kit()
        for n in range(5):
            kit.put(n, owner="p")
        one = kit.get("a")[0]
        kit.get("b")
        kit.get("b")
        kit.queue.ack(one)
        kit.get("a")
        kit.queue.owner_gone("b")
        kit.queue.owner_gone("a")
        assert [kit.get("c")[1][0][1] for _ in range(4)] == [["1!"], ["2!"], ["3!"], ["4"]]

    def test_a_dead_consumers_items_go_to_waiting_getters(self):
        kit = Kit()
        kit.put("x")
        kit.get("a")
        waiting = kit.get("b")[0]
        assert said(kit.queue.owner_gone("a")) == [(waiting.id, ["x!"])]

    def test_requests_of_a_dead_process_stop_waiting(self):
        kit = Kit()
        kit.get("a")
        kit.batch(3, "a")
        kit.queue.owner_gone("a")
        kit.put("x", owner="p")
        assert kit.get("b")[1][0][1] == ["x"]

    def test_items_of_a_dead_producer_stay_whether_parked_or_not(self):
        kit = Kit(maxsize=1)
        kit.put("x", owner="p")
        kit.put("y", owner="p")
        kit.queue.owner_gone("p")
        assert kit.get("b")[1][0][1] == ["x"]
        assert kit.get("b")[1][0][1] == ["y"]

    def test_a_cancelled_put_was_not_put(self):
        kit = Kit(maxsize=1)
        kit.put("x")
        parked = kit.put("y")[0]
        assert said(kit.queue.cancel(parked)) == [(parked.id, "cancelled")]
        assert kit.get()[1] == [(3, ["x"])]


class TestClose:
    def test_close_ends_puts_at_once_and_gets_when_empty(self):
        kit = Kit(maxsize=1)
        kit.put("x")
        parked = kit.put("y")[0]
        waiting = kit.get(key=b"other")[0]
        assert said(kit.queue.close()) == [(parked.id, "closed"), (waiting.id, "closed")]
        assert kit.put("z")[1][0][1] == "closed"
        assert kit.get()[1][0][1] == ["x"]
        assert kit.get()[1][0][1] == "closed"
        assert kit.get(nowait=True)[1][0][1] == "closed"
        assert kit.batch(1)[1][0][1] == "closed"
        assert kit.queue.close() == []

    def test_close_gives_a_waiting_batch_what_it_has(self):
        kit = Kit()
        kit.put("x", 1)
        batch = kit.batch(3)[0]
        assert said(kit.queue.close()) == [(batch.id, ["x"])]

    def test_a_batch_of_a_closed_channel_gets_the_rest(self):
        kit = Kit()
        kit.put("x", 1)
        kit.queue.close()
        assert kit.batch(3)[1][0][1] == ["x"]

    def test_killed_consumer_returns_its_items(self):
        kit = Kit()
        kit.put("x")
        kit.get("a")
        kit.queue.close()
        kit.queue.owner_gone("a")
        assert kit.get("b")[1][0][1] == ["x!"]


OWNERS = ("a", "b", "c")
KEYS = (b"k", b"l")


class Anything(RuleBasedStateMachine):
    """Puts, gets, batches, cancels, acknowledgements and deaths in any order: nothing is lost, nothing is twice."""

    def __init__(self):
        super().__init__()
        self.queue = ChannelQueue(maxsize=2, max_bytes=20)
        self.ids = itertools.count(1)
        self.values = itertools.count(1)
        self.open: dict[Ticket, str] = {}
        self.answered: set[Ticket] = set()
        self.key_of: dict[int, bytes] = {}
        self.sizes: dict[int, int] = {}
        self.inside: set[int] = set()
        self.parked: dict[Ticket, int] = {}
        self.away: dict[Ticket, list[int]] = {}
        self.done: list[int] = []
        self.returned: set[int] = set()
        self.last: dict[bytes, int] = dict.fromkeys(KEYS, 0)
        self.dead: set[str] = set()

    def ticket(self, owner):
        return Ticket(owner, owner.encode(), next(self.ids))

    def take(self, commands):
        for command in one_by_one(commands):
            if isinstance(command, AcceptPuts):
                self.take([AcceptPut(Ticket(command.peer.decode(), command.peer, id)) for id in command.ids])
                continue
            ticket = command.ticket
            assert ticket not in self.answered, "answered twice"
            self.answered.add(ticket)
            self.open.pop(ticket, None)
            if isinstance(command, AcceptPut):
                self.inside.add(self.parked.pop(ticket))
            elif isinstance(command, RefuseRequest):
                self.parked.pop(ticket, None)
            else:
                values = [item.value for item in command.items]
                for item in command.items:
                    self.inside.remove(item.value)
                    key = self.key_of[item.value]
                    if item.value in self.returned:
                        self.returned.discard(item.value)
                    else:
                        assert item.value > self.last[key] or item.value in self.seen, "out of order"
                        self.last[key] = max(self.last[key], item.value)
                    self.seen.add(item.value)
                assert values == sorted(values)
                if values:
                    self.away[ticket] = values

    @property
    def seen(self):
        return self.__dict__.setdefault("_seen", set())

    @rule(owner=st.sampled_from(OWNERS), key=st.sampled_from(KEYS), weight=st.integers(0, 3), size=st.integers(0, 15),
          nowait=st.booleans())  # fmt: skip
    def put(self, owner, key, weight, size, nowait):
        ticket, value = self.ticket(owner), next(self.values)
        self.key_of[value], self.sizes[value] = key, size
        self.parked[ticket] = value
        self.open[ticket] = "put"
        self.take(self.queue.put(ticket, key, QueuedItem(value, size, weight), nowait))

    @rule(owner=st.sampled_from(OWNERS), key=st.sampled_from(KEYS), sizes=st.lists(st.integers(0, 15), max_size=4))
    def put_several(self, owner, key, sizes):
        tickets, items = [], []
        for size in sizes:
            ticket, value = self.ticket(owner), next(self.values)
            self.key_of[value], self.sizes[value] = key, size
            self.parked[ticket] = value
            self.open[ticket] = "put"
            tickets.append(ticket)
            items.append(QueuedItem(value, size))
        self.take(self.queue.put_all(owner, owner.encode(), [ticket.id for ticket in tickets], key, items))

    @rule(owner=st.sampled_from(OWNERS), key=st.sampled_from(KEYS), count=st.integers(0, 4))
    def get_several(self, owner, key, count):
        tickets = [self.ticket(owner) for _ in range(count)]
        self.open.update(dict.fromkeys(tickets, "get"))
        self.take(self.queue.get_all(owner, owner.encode(), [ticket.id for ticket in tickets], key))

    @precondition(lambda self: self.away)
    @rule()
    def acknowledge_all(self):
        tickets = list(self.away)
        for ticket in tickets:
            self.done += self.away.pop(ticket)
        self.take(self.queue.ack(*tickets))

    @rule(owner=st.sampled_from(OWNERS), key=st.sampled_from(KEYS), nowait=st.booleans())
    def get(self, owner, key, nowait):
        ticket = self.ticket(owner)
        self.open[ticket] = "get"
        self.take(self.queue.get(ticket, key, nowait))

    @rule(owner=st.sampled_from(OWNERS), key=st.sampled_from(KEYS), goal=st.integers(0, 5))
    def batch(self, owner, key, goal):
        ticket = self.ticket(owner)
        self.open[ticket] = "batch"
        self.take(self.queue.batch(ticket, key, goal))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel_waiting(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.open)))
        self.take(self.queue.cancel(ticket, data.draw(st.booleans())))
        assert ticket in self.answered

    @precondition(lambda self: self.away)
    @rule(data=st.data(), how=st.sampled_from(["ack", "back", "keep"]))
    def end_delivery(self, data, how):
        ticket = data.draw(st.sampled_from(sorted(self.away)))
        if how == "keep":
            assert self.queue.cancel(ticket) == []
            return
        values = self.away.pop(ticket)
        if how == "ack":
            self.done += values
            self.take(self.queue.ack(ticket))
        else:
            self.inside.update(values)
            self.returned.update(values)
            self.take(self.queue.cancel(ticket, back=True))

    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner):
        for ticket in [t for t in self.away if t.owner == owner]:
            values = self.away.pop(ticket)
            self.inside.update(values)
            self.returned.update(values)
        for ticket in [t for t, kind in self.open.items() if t.owner == owner and kind != "put"]:
            del self.open[ticket]
            self.answered.add(ticket)  # nobody is there to answer
        self.take(self.queue.owner_gone(owner))

    @rule()
    def close_once_in_a_while(self):
        if next(self.values) % 7 == 0 and not self.queue.closed:
            self.take(self.queue.close())
            assert not self.open
            assert not self.parked

    @invariant()
    def everything_is_somewhere(self):
        assert len(self.done) == len(set(self.done))
        waiting = [item.value for key in self.queue.in_use() for item in self.queue.waiting(key)]
        assert set(waiting) <= self.inside
        for key in KEYS:
            order = [item.value for item in self.queue.waiting(key)]
            assert order == sorted(order)
        held = self.inside - set(waiting)
        assert not held or any(kind == "batch" for kind in self.open.values()), "lost"

    @invariant()
    def nobody_waits_without_need(self):
        for ticket, kind in self.open.items():
            if kind != "put":
                key = self.queue._waiting[ticket]
                assert not self.queue.waiting(key)

    @invariant()
    def unused_keys_are_gone(self):
        for key in self.queue.in_use():
            assert not self.queue._keys[key].unused

    @invariant()
    def bytes_are_what_is_there(self):
        for key in self.queue.in_use():
            queue = self.queue._keys[key]
            if queue.parked:
                assert not self.queue._room(queue, next(iter(queue.parked.values())).nbytes), "waits without need"
        assert self.queue.nbytes == sum(self.sizes[v] for v in self.inside) + sum(
            self.sizes[v] for values in self.away.values() for v in values
        )
        if not self.inside and not self.away and not self.parked and not self.open:
            assert self.queue.in_use() == []


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=50 * pace.rounds, stateful_step_count=40)
TestAnything.pytestmark = [pytest.mark.timeout(120)]
