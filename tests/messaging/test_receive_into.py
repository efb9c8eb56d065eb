"""recv_tensor by a lane: into the given tensor if it fits, and never after the receive has ended."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import weakref

import pytest
from message_kit import World

from rlinf_actors.errors import CallTimeoutError, PeerDiedError, RlinfActorsError
from rlinf_actors.messaging import contents, process_groups, tensor_receiver
from rlinf_actors.messaging.lanes import Lane
from rlinf_actors.messaging.process_groups import Wire
from rlinf_actors.messaging.receive_into import ReceiveInto, _offer, target_for
from rlinf_actors.messaging.tensor_receiver import IncomingTensors
from rlinf_actors.model.address import WorkerAddress
from rlinf_actors.wire import arrays, frames
from rlinf_actors.wire.payload import AuthenticatedParts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

COUNT = 300_000


class Group:
    """A process group whose receives end when the test says so."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.buffers = []
        self.aborted = False

    def recv(self, tensors, rank, tag):
        self.buffers += tensors
        return self

    def wait(self):
        self.begun.set()
        assert self.go_on.wait(10)
        if self.aborted:
            raise RuntimeError("aborted")
        self.buffers[-1].fill_(1)

    def abort(self):
        self.aborted = True
        self.go_on.set()


class LikeOldGloo(Group):
    abort = None

    def __getattribute__(self, name):
        if name in process_groups.ABORTS:
            raise AttributeError(name)
        return super().__getattribute__(name)


class Lanes:
    """A lane over a Group, and the message whose tensor it brings."""

    def __init__(self, target, group=None, shape=(COUNT,)):
        self.group = group or Group()
        self.broken = []
        self.lane = Lane("test", lambda: Wire(self.group), self.broke)
        header = frames.TensorHeader("uint8", list(shape), False, "cpu", "lane")
        transfer = frames.TensorTransfer(1, 1, [header])
        self.parts, self.offer = _offer(target)
        self.incoming = IncomingTensors("x", transfer, AuthenticatedParts(self.parts), None, lambda: None)
        self.lane.lane = self.lane

    def broke(self, lane, error):
        self.broken.append(error)
        lane.end(lambda: RlinfActorsError("the lane has ended"))

    def join(self):
        self.incoming.join(self.lane, self.broke)


@pytest.fixture
def target():
    return torch.zeros(COUNT, dtype=torch.uint8)


@pytest.fixture
def lanes(target):
    made = []

    def make(*args, **options):
        made.append(Lanes(target, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.lane.end(lambda: RlinfActorsError("the test is over"))
        one.group.go_on.set()
        one.lane._thread.join(10)
        assert not one.lane._thread.is_alive()


def test_an_offered_tensor_is_received_in_place(lanes, target):
    one = lanes()
    one.incoming.offer(one.offer)
    one.join()
    one.group.go_on.set()
    one.incoming.wait(10)
    assert one.incoming.in_target
    assert one.group.buffers[0].data_ptr() == target.data_ptr()
    assert target.all()


@pytest.mark.parametrize("why", ["late", "shape", "no abort"])
def test_a_tensor_that_cannot_be_received_in_place_has_memory_of_its_own(lanes, target, why):
    one = lanes(LikeOldGloo() if why == "no abort" else None, shape=(COUNT, 1) if why == "shape" else (COUNT,))
    if why == "late":
        one.join()
        assert one.group.begun.wait(10)
    one.incoming.offer(one.offer)
    if why != "late":
        one.join()
    one.group.go_on.set()
    assert one.incoming.tensors()[0].all()
    assert not one.incoming.in_target
    assert not target.any()


def test_a_tensor_taken_back_before_it_arrives_is_not_written(lanes, target):
    one = lanes()
    one.incoming.offer(one.offer)
    one.incoming.take_back()
    one.join()
    one.group.go_on.set()
    assert one.incoming.tensors()[0].all()
    assert not target.any()


def test_a_tensor_taken_back_while_it_arrives_is_kept_for_the_next_receive(lanes, target):
    one = lanes()
    one.incoming.offer(one.offer)
    one.join()
    assert one.group.begun.wait(10)
    ending = threading.Timer(0.05, one.group.go_on.set)
    ending.start()
    one.incoming.take_back()
    ending.join()
    assert target.all()
    target.zero_()
    assert one.incoming.tensors()[0].all()
    assert (one.incoming.in_target, one.broken) == (False, [])


def test_a_transfer_that_stands_still_is_aborted_before_the_tensor_is_given_back(lanes, target, monkeypatch):
    monkeypatch.setattr(tensor_receiver, "TAKE_BACK_S", 0.05)
    one = lanes()
    one.incoming.offer(one.offer)
    one.join()
    assert one.group.begun.wait(10)
    one.incoming.take_back()
    assert one.group.aborted
    assert [type(error) for error in one.broken] == [CallTimeoutError]
    with pytest.raises(RlinfActorsError, match="the lane has ended"):
        one.incoming.tensors()
    assert not target.any()


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.zeros(600, 600, dtype=torch.uint8).t(),
        lambda: torch.zeros(COUNT, dtype=torch.complex64).conj(),
        lambda: torch.zeros(3),
    ],
)
def test_memory_that_does_not_hold_the_values_in_order_is_not_offered(odd):
    assert _offer(odd())[1] is None


# --- the whole, by gloo ---


@pytest.fixture
async def pair():
    world = World(1 << 30, {"cpu": "lane"})
    (a,), (b,) = world.launch("a"), world.launch("b")
    yield a, b
    for member in (a, b):
        world.die(member)
    for member in (a, b):
        for sender in list(member.messenger._tensor_senders.values()):
            sender._fail(PeerDiedError("the test is over"))
        member.messenger.tensor_receiver._lanes.end_all(lambda: PeerDiedError("the test is over"))


def wait_into(b, target, timeout=20):
    work = b.messenger.receive_into(WorkerAddress("a", 0), target)
    return asyncio.ensure_future(asyncio.to_thread(b.messenger.wait, work, timeout))


async def test_recv_tensor_by_a_lane_copies_nothing(pair, monkeypatch):
    a, b = pair
    copies = []
    monkeypatch.setattr(contents, "copy_into", lambda *args, **kwargs: copies.append(args))
    for n in range(1, 4):
        target = torch.zeros(1000, 300)
        waiting = wait_into(b, target)
        while not b.messenger._mailbox._queues:  # noqa: ASYNC110 - posted on another thread
            await asyncio.sleep(0)
        a.send("b:0", torch.full((1000, 300), float(n)))
        assert await waiting is None
        assert (target == n).all()
    assert copies == []


async def test_a_message_that_is_no_lone_tensor_is_refused_and_the_tensor_unchanged(pair):
    a, b = pair
    for value, error in (([torch.ones(COUNT)], TypeError), (torch.ones(COUNT, dtype=torch.int32), ValueError)):
        target = torch.zeros(COUNT)
        waiting = wait_into(b, target)
        a.send("b:0", value)
        with pytest.raises(error, match="a:0"):
            await waiting
        assert not target.any()


async def test_a_receive_that_timed_out_leaves_its_tensor_to_the_next(pair):
    a, b = pair
    first, second = torch.zeros(COUNT), torch.zeros(COUNT)
    with pytest.raises(CallTimeoutError):
        await wait_into(b, first, 0.05)
    a.send("b:0", torch.ones(COUNT))
    assert await wait_into(b, second) is None
    assert second.all()
    assert not first.any()
    assert isinstance(b.messenger.receive_into(WorkerAddress("a", 0), first), ReceiveInto)


# --- by bulk streams ---


class Receiver:
    """a:0 has sent the header of a tensor, whose bytes arrive when the test says so. b:0 receives it."""

    def __init__(self, tensor, target):
        world = World()
        (self.a,), (self.b,) = world.launch("a"), world.launch("b")
        self.messenger, self.target, self.data = self.b.messenger, target, arrays.bytes_of(tensor)
        self.parts = arrays.encode(tensor)
        self.frame = frames.UserMessage(1, 1, "a:0", self.a.id, "", 1000)
        self.answers = []
        self.asked, self.go = threading.Event(), threading.Event()
        self.again = self.asked.set
        self.messenger._reply = lambda link, frame: self.answers.append(frame)

    async def wait(self, timeout=10.0, *, hold=False):
        """Begin to receive into the target; a thread waits. If *hold*, its time begins when `go` is set."""
        self.work = self.messenger.receive_into(WorkerAddress("a", 0), self.target)
        if hold:
            within = self.work._wait_within
            self.work._wait_within = lambda limit: (self.go.wait(60), within(limit))[1]
        waiting = asyncio.create_task(asyncio.to_thread(self.messenger.wait, self.work, timeout))
        while not (self.work._waiting and self.messenger._mailbox._queues):  # noqa: ASYNC110 - a thread does it
            await asyncio.sleep(0.001)
        return waiting

    def begin(self):
        self.given = target_for(self.messenger, self.frame, [self.parts[0], b""], len(self.data), self.again)
        return self.given

    def arrive(self):
        """All bytes arrive, and the message is delivered."""
        self.given.memory[:] = self.data
        self.given.finish()
        self.messenger.arrived(b"link", self.frame, AuthenticatedParts([self.parts[0], self.given.memory]))


def numbers(dtype=torch.float32):
    return torch.arange(COUNT).to(dtype)


@pytest.fixture
def no_copy(monkeypatch):
    monkeypatch.setattr(ctypes, "memmove", lambda *args: 1 / 0)


async def test_a_receive_that_waits_later_asks_the_streams_to_ask_again():
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    assert receiver.begin() is None
    waiting = await receiver.wait()
    assert await asyncio.to_thread(receiver.asked.wait, 10)
    assert receiver.begin() is not None
    assert not receiver.messenger.late_targets
    receiver.arrive()
    await waiting
    assert torch.equal(receiver.target, numbers())


async def test_streams_do_not_ask_again_for_a_broadcast():
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    receiver.frame = frames.UserMessage(1, 1, "a:0", receiver.a.id, "tree", 1000)
    assert receiver.begin() is None
    assert not receiver.messenger.late_targets, "no receive into a tensor would take it out"


async def test_streams_receive_into_the_tensor_without_a_copy(no_copy):
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    waiting = await receiver.wait()
    assert receiver.begin().memory.obj.owner.data_ptr() == receiver.target.data_ptr()
    receiver.arrive()
    await waiting
    assert torch.equal(receiver.target, numbers())
    assert [type(answer) for answer in receiver.answers] == [frames.Held]


@pytest.mark.parametrize(
    "target",
    [torch.zeros(COUNT, dtype=torch.int32), torch.zeros(COUNT // 2, 2), torch.zeros(COUNT, 2)[:, 0], torch.zeros(4)],
)
async def test_streams_get_no_tensor_that_does_not_fit(target):
    receiver = Receiver(numbers(), target)
    waiting = await receiver.wait(0.2, hold=True)
    assert receiver.begin() is None
    receiver.go.set()
    with pytest.raises(CallTimeoutError):
        await waiting


async def test_streams_get_no_tensor_if_another_message_comes_first():
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    receiver.messenger.arrived(b"link", receiver.frame, AuthenticatedParts(contents.encode("earlier")[0]))
    assert receiver.begin() is None


async def test_receive_that_times_out_has_its_tensor_back_and_the_next_one_gets_the_message():
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    waiting = await receiver.wait(0.05, hold=True)
    given = receiver.begin()
    given.memory[:100] = receiver.data[:100]
    receiver.go.set()
    with pytest.raises(CallTimeoutError):
        await waiting
    assert not given.given
    before = receiver.target.clone()
    receiver.arrive()
    assert torch.equal(receiver.target, before)
    assert torch.equal(await receiver.b.recv("a:0"), numbers())


async def test_message_that_another_receive_gets_is_moved_out_of_the_tensor():
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    waiting = await receiver.wait()
    receiver.begin()
    other = frames.UserMessage(1, 0, "a:0", receiver.a.id, "", 1000)
    receiver.messenger.arrived(b"link", other, AuthenticatedParts(contents.encode(torch.ones(COUNT))[0]))
    await waiting
    assert receiver.target.eq(1).all()
    receiver.arrive()
    assert receiver.target.eq(1).all()
    assert torch.equal(await receiver.b.recv("a:0"), numbers())


async def test_receive_whose_sender_dies_has_its_tensor_back():
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    waiting = await receiver.wait()
    given = receiver.begin()
    receiver.a.world.die(receiver.a)
    with pytest.raises(PeerDiedError):
        await waiting
    assert not given.given


async def test_given_tensor_is_freed_with_its_last_reference():
    receiver = Receiver(numbers(), torch.zeros(COUNT))
    waiting = await receiver.wait()
    receiver.begin()
    receiver.arrive()
    await waiting
    await asyncio.get_running_loop().shutdown_default_executor()  # its thread keeps the result for a moment
    freed = weakref.ref(receiver.target)
    gc.disable()
    try:
        receiver.given = receiver.work = receiver.target = waiting = None
        await asyncio.sleep(0)
        assert freed() is None
    finally:
        gc.enable()
