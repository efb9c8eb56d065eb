"""Takes of the queue: what is out until it is released, and what is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_channel_queue import KEY, Kit, said

from rlinf_actors.channel.queue import ChannelQueue
from rlinf_actors.channel.queue_commands import QueuedItem, RefuseRequest, Ticket, one_by_one


class TakeKit(Kit):
    def __init__(self, maxsize: int = 0, max_bytes: int = 0, max_deliveries: int = 3) -> None:
        super().__init__()
        self.queue = ChannelQueue(maxsize, max_bytes, max_deliveries)

    def take(self, owner="a", key=KEY):
        ticket = self.ticket(owner)
        return ticket, said(self.queue.take(ticket, key, f"{owner}:0"))


def dead(kit):
    return [(item.value, item.failed, *item.last_failure) for item in kit.queue.undeliverable(KEY)]


def test_an_item_is_out_until_it_is_released():
    kit = TakeKit()
    kit.put("x")
    out, told = kit.take()
    assert told == [(out.id, ["x"])]
    assert kit.queue.is_out(out)
    assert kit.queue.size(KEY) == 0
    kit.queue.ack(out)
    assert not kit.queue.is_out(out)
    assert kit.queue.in_use() == []


def test_an_item_that_failed_is_the_head_again_and_counts_its_deliveries():
    kit = TakeKit()
    kit.put("x")
    kit.put("y")
    out = kit.take()[0]
    waiting = kit.take("b")[0]
    assert said(kit.queue.fail(out, "ValueError: no")) == []
    [first] = kit.queue.waiting(KEY)
    assert (first.value, first.again, first.failed, first.last_failure) == ("x", True, 1, ("a:0", "ValueError: no"))
    kit.queue.fail(waiting, "ValueError: no")
    assert [(item.value, item.failed) for item in kit.queue.waiting(KEY)] == [("x", 1), ("y", 1)]


def test_a_failed_item_goes_at_once_to_a_waiting_take():
    kit = TakeKit()
    kit.put("x")
    out, waiting = kit.take()[0], kit.take("b")[0]
    assert said(kit.queue.fail(out, "no")) == [(waiting.id, ["x!"])]
    assert kit.queue.fail(out, "no") == kit.queue.ack(out) == [], "it went back before"


def test_an_item_that_fails_too_often_becomes_undeliverable_and_one_take_is_refused():
    kit = TakeKit(max_deliveries=2)
    kit.put("bad")
    kit.put("good")
    kit.queue.fail(kit.take()[0], "no")
    kit.queue.owner_gone("b", "unknown")
    kit.queue.fail(kit.take("b")[0], "died")
    ticket = kit.ticket("c")
    [refused] = kit.queue.take(ticket, KEY, "c:0")
    assert isinstance(refused, RefuseRequest)
    assert refused.item is not None
    assert (refused.why, refused.item.value) == ("undeliverable", "bad")
    assert kit.take("c")[1][0][1] == ["good"]
    assert dead(kit) == [("bad", 2, "b:0", "died")]


def test_takes_behind_a_refused_one_go_on():
    kit = TakeKit(max_deliveries=1)
    kit.put("bad")
    out, told, next = kit.take()[0], kit.take("b")[0], kit.take("c")[0]
    assert said(kit.queue.fail(out, "no")) == [(told.id, "undeliverable")]
    assert kit.put("good")[1][1:] == [(next.id, ["good"])]


def test_without_a_limit_an_item_is_tried_for_ever():
    kit = TakeKit(max_deliveries=0)
    kit.put("bad")
    for _ in range(100):
        kit.queue.fail(kit.take()[0], "no")
    assert kit.take()[1][0][1] == ["bad!"]


def test_deaths_of_gets_count_and_cancelled_ones_do_not():
    kit = TakeKit(max_deliveries=1)
    kit.put("x")
    kit.queue.cancel(kit.get()[0], back=True)
    kit.queue.cancel(kit.take()[0], back=True)
    kit.get("b")
    kit.queue.owner_gone("b", "it died")
    assert kit.take()[1][0][1] == "undeliverable"
    assert dead(kit) == [("x", 1, "", "it died")]


def test_a_get_gets_an_item_beyond_the_limit():
    kit = TakeKit(max_deliveries=1)
    kit.put("x")
    kit.queue.fail(kit.take()[0], "no")
    assert kit.get()[1][0][1] == ["x!"]


def test_undeliverable_items_count_bytes_but_their_key_accepts_one_item():
    kit = TakeKit(max_bytes=10, max_deliveries=1)
    kit.put("bad", nbytes=10)
    kit.queue.fail(kit.take()[0], "no")
    kit.take()
    assert kit.queue.nbytes == 10
    assert kit.put("one", nbytes=5)[1][0][1] == "in"
    waiting = kit.put("two", nbytes=5)[0]
    drained = kit.ticket("b")
    assert said(kit.queue.drain(drained, KEY)) == [(drained.id, ["bad!"])]
    assert said(kit.queue.ack(drained)) == [(waiting.id, "in")]
    assert kit.queue.nbytes == 10


@pytest.mark.parametrize("end", ["death", "cancelled"])
def test_an_unacknowledged_drain_leaves_the_list_as_it_was(end):
    kit = TakeKit(max_deliveries=1)
    for name in "xy":
        kit.put(name)
        kit.queue.fail(kit.take()[0], "no")
        kit.take()
    before = dead(kit)
    drained = kit.ticket("b")
    kit.queue.drain(drained, KEY)
    assert dead(kit) == []
    if end == "death":
        kit.queue.owner_gone("b", "it died")
    else:
        kit.queue.cancel(drained, back=True)
    assert dead(kit) == before
    assert kit.queue.size(KEY) == 0


class TestClose:
    def test_a_queue_is_not_drained_while_an_item_is_out(self):
        kit = TakeKit()
        kit.put("x")
        out = kit.take()[0]
        kit.queue.close()
        assert not kit.queue.drained
        kit.queue.ack(out)
        assert kit.queue.drained

    def test_a_queue_is_not_drained_while_it_has_undeliverable_items(self):
        kit = TakeKit(max_deliveries=1)
        kit.put("x")
        kit.queue.fail(kit.take()[0], "no")
        kit.take()
        kit.queue.close()
        assert not kit.queue.drained
        drained = kit.ticket()
        kit.queue.drain(drained, KEY)
        assert not kit.queue.drained
        kit.queue.ack(drained)
        assert kit.queue.drained

    def test_takes_of_a_closed_queue_wait_for_items_that_are_out_and_gets_do_not(self):
        kit = TakeKit()
        kit.put("x")
        out = kit.take()[0]
        before = kit.take("b")[0]
        assert kit.queue.close() == []
        after, told = kit.take("c")
        assert told == []
        assert kit.get()[1][0][1] == "closed"
        assert said(kit.queue.fail(out, "no")) == [(before.id, ["x!"])]
        assert said(kit.queue.ack(before)) == [(after.id, "closed")]
        assert kit.take()[1][0][1] == "closed"
        assert kit.queue.drained

    def test_the_last_take_ends_as_closed_when_the_item_becomes_undeliverable(self):
        kit = TakeKit(max_deliveries=1)
        kit.put("x")
        out, told, last = kit.take()[0], kit.take("b")[0], kit.take("c")[0]
        kit.queue.close()
        assert said(kit.queue.fail(out, "no")) == [(told.id, "undeliverable"), (last.id, "closed")]


@given(
    st.lists(
        st.tuples(st.sampled_from(["release", "fail", "die", "take", "get", "drain", "close"]), st.integers(0, 9))
    ),
    st.integers(0, 3),
)
def test_every_item_is_in_one_place_and_none_is_taken_too_often(steps, limit):
    queue = ChannelQueue(max_deliveries=limit)
    released, drains, out, number = set(), set(), {}, iter(range(1000))
    items = [QueuedItem(value, nbytes=1) for value in range(3)]
    for item in items:
        queue.put(Ticket("p", b"p", next(number)), KEY, item)

    def hear(commands):
        for command in one_by_one(commands):
            if not isinstance(command, RefuseRequest) and command.items:
                assert not (command.kind == "take" and 0 < limit <= command.items[0].failed)
                drains.update({command.ticket} if command.kind == "drain" else ())
                out[command.ticket] = [item.value for item in command.items]

    for step, which in steps:
        owner = f"o{which % 3}"
        ticket = Ticket(owner, b"", next(number))
        chosen = sorted(out)[which % len(out)] if out else None
        if step == "take":
            hear(queue.take(ticket, KEY, owner))
        elif step == "get":
            hear(queue.get(ticket, KEY, nowait=True))
        elif step == "drain":
            hear(queue.drain(ticket, KEY))
        elif step == "close":
            hear(queue.close())
        elif step == "die":
            for gone in [known for known in out if known.owner == owner]:
                del out[gone]
            hear(queue.owner_gone(owner, "died"))
        elif chosen is not None and step == "release":
            released.update(out.pop(chosen))
            hear(queue.ack(chosen))
        elif chosen is not None and chosen not in drains:
            del out[chosen]
            hear(queue.fail(chosen, "no"))
        places = [item.value for item in (*queue.waiting(KEY), *queue.undeliverable(KEY))]
        places += [value for values in out.values() for value in values]
        assert sorted([*places, *released]) == [0, 1, 2]
        assert queue.nbytes == 3 - len(released)
        if queue.closed and len(released) == 3:
            assert queue.drained
