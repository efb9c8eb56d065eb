"""Broadcasts of workers in one loop: whom the bytes pass, and how every member hears of what goes wrong."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from message_kit import World, settle

from rlinf_actors.errors import GroupNotFoundError, PeerDiedError, SerializationError, WorkerError
from rlinf_actors.tracing import recorder, ring


@pytest.fixture
async def world():
    return World()


ALL = [("a", range(6))]


def all_but_first(members, groups=ALL, **options):
    return [member.broadcast(None, groups, **options) for member in members[1:]]


async def died(work, who):
    with pytest.raises(PeerDiedError, match=rf"^broadcast\(\).*: worker {who} .*SIGKILL") as caught:
        await work
    assert caught.value.peer == who


async def everybody_meets(members, groups=ALL):
    works = all_but_first(members, groups)
    await members[0].broadcast("met", groups)
    assert [await work for work in works] == ["met"] * len(works)


# --- the way of the bytes ---


async def test_one_copy_goes_to_each_node_and_on_from_there(world):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    value = bytearray(300_000)
    works = all_but_first(members)
    sent = members[0].broadcast(value, ALL)
    assert await sent is value
    for work in works:
        assert await work == value
    senders = [[message.src for message in member.messages] for member in members]
    assert senders == [[], ["a:0"], ["a:0"], ["a:2"], ["a:0"], ["a:4"]]


async def test_links_go_down_the_tree_only(world):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    await everybody_meets(members)
    await settle()
    linked = [[peer.rank for peer in member.known["a"].peers if peer.connected] for member in members]
    assert linked == [[1, 2, 4], [], [3], [], [5], []]


async def test_a_members_object_is_its_own_to_change(world):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    works = all_but_first(members)
    await members[0].broadcast(bytearray(300_000), ALL)
    for work in works:
        got = await work
        assert not any(got)
        got[:] = b"x" * len(got)


async def test_a_members_object_is_freed_with_its_last_reference(world):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    gc.disable()  # or it would be lent, and its sender's memory taken, until the collector runs
    try:
        works = all_but_first(members)
        await members[0].broadcast({"a", "set"}, ALL)
        kept = [weakref.ref(await work) for work in works]
        await settle()
        works.clear()
        assert [reference() for reference in kept] == [None] * 5
    finally:
        gc.enable()


async def test_many_in_a_row_small_and_large_keep_their_order(world):
    members = world.launch("a", 6, nodes=[0, 1, 0, 1, 2, 0])
    values = [n if n % 3 else bytearray([n]) * 40_000 for n in range(60)]
    given = [members[0].broadcast(value, ALL) for value in values]
    works = [[member.broadcast(None, ALL) for _ in values] for member in members[1:]]
    for member in works:
        assert [await work for work in member] == values
    assert [await work for work in given] == values


@pytest.fixture
def traced():
    yield recorder.start(1 << 12, {})
    recorder.stop()


@pytest.mark.parametrize("size", [1, 300_000])
async def test_trace_has_a_span_of_each_member_and_an_arrow_to_each_receiver(world, traced, size):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    for _ in range(2):
        sent = members[0].broadcast(bytearray(size), ALL)
        for work in [*all_but_first(members), sent]:
            await work
    found = ring.read(bytes(traced.memory))
    assert [span.name for span in found.spans] == (["broadcast"] + ["broadcast from a:0"] * 5) * 2
    assert all(span.end >= span.start and span.cat == "message" for span in found.spans)
    starts = {point.flow: point for point in found.points if point.kind == "out"}
    ends = {point.flow: point for point in found.points if point.kind == "in"}
    assert len(starts) == len(ends) == 10
    member_of = {span.number: index for index, span in enumerate(found.spans)}  # 6 to 11 in the second broadcast
    arrows = sorted((member_of[starts[flow].span], member_of[end.span]) for flow, end in ends.items())
    down = [(0, 1), (0, 2), (0, 4), (2, 3), (4, 5)]  # from whom each member gets the bytes
    assert arrows == down + [(begin + 6, end + 6) for begin, end in down]


async def test_trace_ends_the_spans_of_a_broadcast_that_fails(world, traced):
    members = world.launch("a", 3)
    groups = [("a", range(3))]
    works = all_but_first(members, groups)
    with pytest.raises(SerializationError):
        members[0].broadcast(threading.Lock(), groups)
    for work in works:
        with pytest.raises(SerializationError):
            await work
    await settle()
    assert [span.end > 0 for span in ring.read(bytes(traced.memory)).spans] == [True] * 3


# --- a member that cannot take part as it should ---


async def test_an_object_that_cannot_be_pickled_is_everybodys_error_and_the_next_broadcast_works(world):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 1, 1])
    works = all_but_first(members)
    with pytest.raises(SerializationError, match=r"object\['lock'\] cannot be pickled"):
        members[0].broadcast({"lock": threading.Lock()}, ALL)
    for work in works:
        with pytest.raises(SerializationError) as caught:
            await work
        assert isinstance(caught.value, WorkerError)
        assert caught.value.worker == "a:0"
        assert str(caught.value).startswith("broadcast() from a:0: a:0 on node0 raised ")
        assert "object['lock'] cannot be pickled" in str(caught.value)
    await everybody_meets(members)


async def test_a_problem_of_the_source_reaches_all_members_in_order(world):
    members = world.launch("a", 3)
    groups = [("a", range(3))]
    first = members[0].broadcast(1, groups)
    with pytest.raises(TypeError, match="options"):
        members[0].broadcast(2, groups, problem=TypeError("options is a dict"))
    last = members[0].broadcast(3, groups)
    works = [member.broadcast(None, groups) for member in members[1:] for _ in range(3)]
    for one, two, three in (works[:3], works[3:]):
        assert await one == 1
        with pytest.raises(TypeError, match="a:0 on node0 raised TypeError: options is a dict"):
            await two
        assert await three == 3
    assert [await first, await last] == [1, 3]


async def test_a_problem_of_a_relay_is_raised_there_alone(world):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    with pytest.raises(TypeError, match="options"):
        members[2].broadcast(None, ALL, problem=TypeError("options is a dict"))
    works = [member.broadcast(None, ALL) for member in members[1:2] + members[3:]]
    await members[0].broadcast("x", ALL)
    assert [await work for work in works] == ["x"] * 4
    await everybody_meets(members)


async def test_an_exception_that_is_broadcast_is_an_object(world):
    members = world.launch("a", 2)
    got = members[1].broadcast(None, [("a", [0, 1])])
    await members[0].broadcast(ValueError("an object"), [("a", [0, 1])])
    assert repr(await got) == "ValueError('an object')"


async def test_a_broadcast_to_a_group_that_is_not_running_fails(world):
    (a,) = world.launch("a")
    groups = [("a", 0), ("b", 0)]
    with pytest.raises(GroupNotFoundError, match=r"^broadcast\(\): no group 'b'"):
        await a.broadcast(1, groups)
    (b,) = world.launch("b")
    got = b.broadcast(None, groups)
    await a.broadcast(2, groups)
    assert await got == 2


# --- ends ---


@pytest.mark.parametrize("victim", range(6))
async def test_a_members_death_fails_all_that_wait(world, victim):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    await everybody_meets(members)
    works = {member.rank: member.broadcast(None, ALL) for member in members[1:] if member.rank != victim}
    world.die(members[victim])
    for work in works.values():
        await died(work, f"a:{victim}")
    for member in members:
        if member.rank != victim:
            await died(member.broadcast("x", ALL), f"a:{victim}")
            assert not len(member.messenger._mailbox)
            assert member.broadcaster._trees == {}


@pytest.mark.parametrize("victim", range(6))
async def test_a_member_that_died_before_the_look_up_fails_the_broadcast(world, victim):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    world.die(members[victim])
    for member in members:
        if member.rank != victim:
            await died(member.broadcast("x", ALL), f"a:{victim}")


async def test_a_relays_death_fails_only_members_that_it_has_not_served(world):
    members = world.launch("a", 6, nodes=[0, 0, 1, 1, 2, 2])
    await everybody_meets(members)
    works = {rank: members[rank].broadcast(None, ALL) for rank in (1, 3, 4, 5)}
    sent = members[0].broadcast(bytearray(500_000), ALL)
    for rank in (1, 4, 5):
        assert len(await works[rank]) == 500_000
    await sent
    world.die(members[2])
    await died(works[3], "a:2")


async def test_messages_of_an_ended_broadcast_are_dropped_and_credited(world):
    """A member hears of a death before what its parent, which has not heard, sends."""
    members = world.launch("a", 4, nodes=[0, 0, 0, 0])
    groups = [("a", range(4))]
    await everybody_meets(members, groups)
    world.die(members[3], tell=False)
    waiting = members[1].broadcast(None, groups)
    world.tell(members[3], members[1])
    await died(waiting, "a:3")
    for _ in range(3):
        members[0].broadcast(bytearray(world.window), groups)
    await members[0].send("a:1", bytearray(world.window))
    assert len(members[1].messenger._mailbox) == 1
    assert len(await members[1].recv("a:0")) == world.window
    assert not len(members[1].messenger._mailbox)


async def test_messages_of_a_dead_source_are_dropped(world):
    members = world.launch("a", 2)
    groups = [("a", [0, 1])]
    await everybody_meets(members, groups)
    members[0].broadcast(bytearray(300_000), groups)
    await settle()
    assert len(members[1].messenger._mailbox) == 1
    world.die(members[0])
    assert not len(members[1].messenger._mailbox)
    await died(members[1].broadcast(None, groups), "a:0")


async def test_a_relaunched_group_has_another_stream(world):
    (a,), (b,) = world.launch("a"), world.launch("b")
    groups = [("a", 0), ("b", 0)]
    got = b.broadcast(None, groups)
    await a.broadcast(1, groups)
    assert await got == 1
    a.broadcast("to the first", groups)
    world.die(b)
    (b,) = world.launch("b")
    got = b.broadcast(None, groups)
    await a.broadcast("to the second", groups)
    assert await got == "to the second"
