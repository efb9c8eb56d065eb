"""Broadcasts of tensors by one process group: each worker has a GPU; gloo stands for NCCL, and the CPU for the GPUs."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
from message_kit import World, settle

torch = pytest.importorskip("torch")

from rlinf_actors.errors import PeerDiedError, RlinfActorsError  # noqa: E402
from rlinf_actors.messaging import broadcast_group, process_groups, routes  # noqa: E402
from rlinf_actors.messaging.broadcast_group import problem  # noqa: E402
from rlinf_actors.messaging.tensor_transfer import TransferEndpoint  # noqa: E402
from rlinf_actors.model.hardware import AcceleratorType  # noqa: E402
from rlinf_actors.wire import frames  # noqa: E402

pytestmark = pytest.mark.torch

COUNT = 100_000
ALL = [("a", range(4))]


@dataclasses.dataclass
class Gpu:
    """The device table of a worker with one GPU."""

    number: int
    kind: str = "cpu"
    ccl: str = "gloo"
    accelerator: AcceleratorType = AcceleratorType.NV_GPU
    backends: tuple = ("gloo",)
    driver: object = None
    home: int = 0

    @property
    def own(self):
        return {f"uuid-{self.number}": 0}

    seen = own

    def get(self):
        return self

    def uuid(self, index):
        return f"uuid-{self.number}"

    def ccl_facts(self, index):
        return routes.Ccl("2.21.5", "H100", f"0000:{self.number}")


@pytest.fixture
def sends(monkeypatch):
    """Counts the tensors that process groups carry."""
    found = []
    real = broadcast_group.GroupWire.send
    monkeypatch.setattr(
        broadcast_group.GroupWire, "send", lambda wire, tensors: (found.append(len(tensors)), real(wire, tensors))
    )
    return found


def lane_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rlinf-actors-lane")]


@pytest.fixture
async def world():
    world = World(1 << 30, {"cpu": "lane"})
    world.devices = lambda member: Gpu(member.rank)
    yield world
    over = PeerDiedError("the test is over")
    for member in world.members:
        for tree in list(member.broadcaster._trees.values()):
            tree.group.end(lambda: over)
        for sender in list(member.messenger._tensor_senders.values()):
            sender._fail(over)
        member.messenger.tensor_receiver._lanes.end_all(lambda: over)
    for thread in lane_threads():
        await asyncio.to_thread(thread.join, 25)
    assert lane_threads() == []


async def send(member, value, groups=ALL):
    return await asyncio.to_thread(member.broadcast, value, groups)


async def once(members, value, groups=ALL):
    works = [member.broadcast(None, groups) for member in members[1:]]
    sent = await send(members[0], value, groups)
    assert await asyncio.to_thread(sent.wait, 20) is value
    return [await asyncio.to_thread(work.wait, 20) for work in works]


async def until_all_have_answered(members, groups=ALL):
    """The first broadcast asks for the members' GPUs, and does not wait for the answers."""
    await once(members, torch.zeros(COUNT), groups)
    senders = members[0].messenger._tensor_senders.values()
    while not all(sender.facts for sender in senders):  # noqa: ASYNC110 - other threads answer
        await asyncio.sleep(0.001)


async def test_ranks_with_a_gpu_each_use_one_process_group(world, sends):
    members = world.launch("a", 4, nodes=[0, 0, 1, 1])
    await until_all_have_answered(members)
    assert sends == []
    for n in range(1, 4):
        value = {"w": torch.full((COUNT,), float(n)), "b": [torch.full((50_000,), n), torch.zeros(0)], "n": n}
        for got in await once(members, value):
            assert (got["n"], got["b"][1].shape) == (n, (0,))
            assert torch.equal(got["w"], value["w"])
            assert torch.equal(got["b"][0], value["b"][0])
    assert sends == [2, 2, 2]


async def test_the_message_goes_down_the_tree_without_the_tensors(world, sends):
    members = world.launch("a", 4, nodes=[0, 0, 1, 1])
    await until_all_have_answered(members)
    for member in members:
        member.messages.clear()
    await once(members, torch.ones(COUNT))
    assert [[message.src for message in member.messages] for member in members] == [[], ["a:0"], ["a:0"], ["a:2"]]
    headers = [message.transfer for member in members[1:] for message in member.messages]
    assert {header.tensors[0].path for header in headers} == {routes.GROUP}
    assert len({(header.lane, header.store) for header in headers}) == 1


async def test_many_in_a_row_keep_their_order(world, sends):
    members = world.launch("a", 4, nodes=[0, 1, 0, 1])
    await until_all_have_answered(members)
    values = [torch.full((COUNT,), float(n)) if n % 3 else n for n in range(20)]
    works = [[member.broadcast(None, ALL) for _ in values] for member in members[1:]]
    given = [await send(members[0], value) for value in values]
    for work in given:
        await asyncio.to_thread(work.wait, 20)
    for member in works:
        for value, work in zip(values, member, strict=True):
            got = await asyncio.to_thread(work.wait, 20)
            assert got == value if isinstance(value, int) else torch.equal(got, value)
    assert len(sends) == 13


async def test_a_rank_that_dies_fails_all_and_the_next_broadcast_works(world, sends, monkeypatch):
    members = world.launch("a", 4, nodes=[0, 0, 1, 1])
    await until_all_have_answered(members)
    joined, join = threading.Semaphore(0), process_groups.join

    def joining(*args):
        made = join(*args)
        joined.release()
        return made

    monkeypatch.setattr(process_groups, "join", joining)
    works = [member.broadcast(None, ALL) for member in members[1:3]]  # the last takes no part
    sent = await send(members[0], torch.ones(COUNT))
    for _ in range(3):
        assert await asyncio.to_thread(joined.acquire, timeout=20)
    await settle()
    assert not any(work.done() for work in works)
    members[3].messenger.peer_gone = lambda peer: None
    world.die(members[3])
    for work in works:
        with pytest.raises(PeerDiedError, match="a:3"):
            await asyncio.to_thread(work.wait, 20)
    with pytest.raises(PeerDiedError, match="a:3"):
        await asyncio.to_thread(sent.wait, 20)
    left, groups = members[:3], [("a", range(3))]
    await until_all_have_answered(left, groups)
    before = len(sends)
    for got in await once(left, torch.full((COUNT,), 7.0), groups):
        assert (got == 7).all()
    assert len(sends) == before + 1


async def test_members_that_hear_late_of_a_death_name_it_although_it_broke_their_group(world, monkeypatch):
    members = world.launch("a", 4, nodes=[0, 0, 1, 1])
    await until_all_have_answered(members)
    joined, join = threading.Semaphore(0), process_groups.join
    broken, broke = threading.Semaphore(0), broadcast_group.BroadcastGroup._broke

    def joining(*args):
        made = join(*args)
        joined.release()
        return made

    def breaking(*args):
        broken.release()
        broke(*args)

    monkeypatch.setattr(process_groups, "join", joining)
    monkeypatch.setattr(broadcast_group, "NEWS_S", 60.0)
    monkeypatch.setattr(broadcast_group.BroadcastGroup, "_broke", breaking)
    works = [member.broadcast(None, ALL) for member in members[1:3]]  # the last takes no part
    sent = await send(members[0], torch.ones(COUNT))
    for _ in range(3):
        assert await asyncio.to_thread(joined.acquire, timeout=20)
    world.die(members[3], tell=False)
    world.tell(members[3], members[0])  # it closes the group's store
    for _ in works:
        assert await asyncio.to_thread(broken.acquire, timeout=20)
    await settle()
    world.tell(members[3], *members[1:3])
    for work in (sent, *works):
        with pytest.raises(PeerDiedError, match="a:3"):
            await asyncio.to_thread(work.wait, 20)


@pytest.fixture
def no_news(monkeypatch):
    monkeypatch.setattr(broadcast_group, "NEWS_S", 0.0)


@pytest.mark.usefixtures("no_news")
async def test_a_group_that_breaks_fails_its_broadcasts_and_the_tree_goes_on(world, sends):
    members = world.launch("a", 4, nodes=[0, 0, 1, 1])
    await until_all_have_answered(members)
    await once(members, torch.ones(COUNT))
    groups = [next(iter(member.broadcaster._trees.values())).group for member in members]
    for group in groups:
        ((lane, _),) = group._lanes.values()
        group._broke(lane, RuntimeError("unhandled cuda error"))
    works = [member.broadcast(None, ALL) for member in members[1:]]
    sent = await send(members[0], torch.full((COUNT,), 3.0))
    await asyncio.to_thread(sent.wait, 20)
    for work in works:
        assert (await asyncio.to_thread(work.wait, 20) == 3).all()
    assert len(sends) == 1


@pytest.mark.usefixtures("no_news")
async def test_a_member_whose_end_has_broken_gets_an_error_at_once(world):
    members = world.launch("a", 4)
    await until_all_have_answered(members)
    await once(members, torch.ones(COUNT))
    group = next(iter(members[1].broadcaster._trees.values())).group
    ((lane, header),) = group._lanes.values()
    group._tell = lambda *_report: None  # the source sends before it hears of it
    group._broke(lane, RuntimeError("unhandled cuda error"))
    group.told(frames.BroadcastFailed("tree", header.lane, "a:0", "closed"))  # a consequence, heard of early
    work = members[1].broadcast(None, ALL)
    sent = await send(members[0], torch.ones(COUNT))
    with pytest.raises(RlinfActorsError, match=r"a:1 failed: unhandled cuda error"):
        await asyncio.to_thread(work.wait, 20)
    with pytest.raises(RlinfActorsError):
        await asyncio.to_thread(sent.wait, 20)  # its other end is gone


class Stuck:
    """A process group whose broadcasts fail at one member, and end at the others only when the group is aborted."""

    def __init__(self, fails):
        self.fails = fails
        self.ended = threading.Event()

    def broadcast(self, tensors, options):
        return self

    def wait(self):
        if not self.fails:
            self.ended.wait()
        raise RuntimeError("no such network interface" if self.fails else "aborted")

    def abort(self):
        self.ended.set()


@pytest.mark.usefixtures("no_news")
@pytest.mark.parametrize("victim", [0, 2])
async def test_a_group_that_breaks_at_one_member_fails_at_all_at_once(world, sends, monkeypatch, victim):
    """The others wait for that member in their back-end, which would not end before RLINF_TIMEOUT."""
    members = world.launch("a", 4, nodes=[0, 0, 1, 1])
    await until_all_have_answered(members)
    monkeypatch.setattr(process_groups, "join", lambda *args: None)
    monkeypatch.setattr(process_groups, "make", lambda _backend, _store, rank, *args, **options: Stuck(rank == victim))
    works = [member.broadcast(None, ALL) for member in members[1:3]]
    works.append(await send(members[0], torch.ones(COUNT)))
    await settle()
    works.append(members[3].broadcast(None, ALL))  # it hears of the failure before it takes part
    for work in works:
        with pytest.raises(RlinfActorsError, match=rf"(?s)a:{victim}.*no such network interface"):
            await asyncio.to_thread(work.wait, 10)
    monkeypatch.undo()
    for got in await once(members, torch.full((COUNT,), 7.0)):
        assert (got == 7).all()


# --- when ---


def facts(number, **changed):
    known = {"host": "here", "accelerator": "NV_GPU", "devices": [f"uuid-{number}"], "backends": ["gloo"], "ipc": True}
    ccl = {"ccl_version": "2.21.5", "model": "H100", "parent": f"0000:{number}"}
    return frames.Facts(7, **{**known, **ccl, **changed})


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([facts(1), facts(2)], ""),
        ([facts(1), facts(2, host="there")], ""),
        ([facts(1), facts(1, host="there")], ""),
        ([facts(1)], "two members"),
        ([facts(1), facts(1)], "share an accelerator"),
        ([facts(1), facts(0)], "are parts of the GPU"),
        ([facts(1), facts(2, devices=[])], "no accelerator"),
        ([facts(1), facts(2, accelerator="AMD_GPU")], "other accelerators"),
        ([facts(1), facts(2, backends=[])], "other accelerators"),
        ([facts(1), facts(2, ccl_version="2.19.3")], "versions differ"),
        ([facts(1), facts(2, model="A100")], "models differ"),
    ],
)
def test_which_members_use_one_group(others, why):
    endpoint = TransferEndpoint(None, "id-a", "a:0", "here")
    assert why in problem(endpoint, Gpu(0), torch.device("cpu"), others)
    assert bool(why) == bool(problem(endpoint, Gpu(0), torch.device("cpu"), others))


def test_a_chosen_path_goes_before_the_group():
    endpoint = TransferEndpoint(None, "id-a", "a:0", "here", overrides={"accelerator": "staged"})
    assert problem(endpoint, Gpu(0), torch.device("cpu"), [facts(1), facts(2)])
