"""The gate before an outbox: what waits for the receiver's facts, which way each tensor takes, and ends."""

from __future__ import annotations

import dataclasses
import threading

import pytest

torch = pytest.importorskip("torch")

from rlinf_actors.errors import PeerDiedError  # noqa: E402
from rlinf_actors.messaging import routes, tensor_transfer  # noqa: E402
from rlinf_actors.messaging.options import CollectiveGroupOptions  # noqa: E402
from rlinf_actors.messaging.outbox import Letter, Trip  # noqa: E402
from rlinf_actors.messaging.tensor_sender import Gate, Parcel, _Load  # noqa: E402
from rlinf_actors.messaging.tensor_transfer import Station  # noqa: E402
from rlinf_actors.model.hardware import AcceleratorType  # noqa: E402
from rlinf_actors.runtime.future import AsyncWork  # noqa: E402
from rlinf_actors.wire import frames  # noqa: E402
from rlinf_actors.wire.payload import AuthenticatedParts  # noqa: E402

pytestmark = pytest.mark.torch


class Peer:
    """The receiver's peer, by hand."""

    name, worker_id = "b:0", "id-b"

    def __init__(self):
        self.error = None
        self.asked = threading.Event()
        self.sent = []
        self.listener = self.watcher = None

    def listen(self, listener):
        self.listener = listener
        return 7

    def on_gone(self, callback):
        self.watcher = callback

    def send(self, frame, parts=()):
        self.sent.append(frame)
        if isinstance(frame, frames.Ask):
            self.asked.set()

    def say(self, frame):
        self.listener(frame)

    def die(self):
        self.error = PeerDiedError("b:0 was killed", peer="b:0")
        self.watcher(self.error)


class Box:
    """The outbox: keeps what it is given."""

    def __init__(self):
        self.letters = []
        self.came = threading.Semaphore(0)

    def post(self, letter, *, now=False):
        self.letters.append(letter)
        self.came.release()


class Io:
    def inside(self):
        return False


@dataclasses.dataclass
class Devices:
    """Two GPUs of one's own."""

    kind: str = "cuda"
    ccl: str = "nccl"
    accelerator: AcceleratorType = AcceleratorType.NV_GPU
    backends: tuple = ("gloo", "nccl")
    driver: object = None
    home: int = 0

    def get(self):
        return self

    def uuid(self, index):
        return f"uuid-{index}"


@dataclasses.dataclass
class OnGpu:
    """What the choice looks at of a tensor."""

    index: int = 0
    type: str = "cuda"

    @property
    def device(self):
        return self


def facts(**changed):
    known = {"host": "here", "accelerator": "NV_GPU", "devices": [], "backends": ["gloo", "nccl"], "ipc": False}
    return frames.Facts(7, **{**known, **changed})


@pytest.fixture
def peer():
    return Peer()


@pytest.fixture
def gate(peer):
    box = Box()
    made = Gate(Station(Io(), "id-a", "a:0", host="here", devices=Devices(), overrides={}), peer, box)
    ended = []
    made.open(ended.append)
    assert peer.asked.wait(10)
    made.box, made.ended = box, ended
    return made


def parcel(value=None, what="send()"):
    hold = tensor_transfer.Hold(cpu=True)
    if value is not None:
        assert hold.take(value) == 0
    return Parcel(Letter("", [b"skeleton"], False, AsyncWork(what)), hold, CollectiveGroupOptions(), False)


def large(fill=1.0):
    return torch.full((50_000,), fill)


def test_nothing_overtakes_what_waits_for_the_facts(gate, peer):
    sent = [parcel(large()), parcel(), parcel(large()), parcel()]
    for one in sent:
        gate.post(one)
    assert gate.box.letters == []
    peer.say(facts(backends=[]))
    for _ in sent:
        assert gate.box.came.acquire(timeout=10)
    assert [letter.cargo is not None for letter in gate.box.letters] == [True, False, True, False]
    assert [letter.cargo.n for letter in gate.box.letters if letter.cargo] == [1, 2]
    assert [frame for frame in peer.sent if isinstance(frame, frames.Ask)] == [frames.Ask(7)]


@pytest.mark.parametrize("error", [OSError("libcuda is no ELF file"), AssertionError("not compiled with CUDA")])
def test_whatever_keeps_the_devices_from_starting_hangs_no_send(peer, error, caplog):
    class Broken(Devices):
        def get(self):
            raise error

    gate = Gate(Station(Io(), "id-a", "a:0", host="here", devices=Broken()), peer, Box())
    gate.open(lambda gate: None)
    assert peer.asked.wait(10)
    assert peer.sent == [frames.Ask(7)], "it asks without a device of its own"
    assert str(error) in caplog.text


def test_no_thread_for_the_question_hangs_no_send(peer, monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread: pids.max is met")

    monkeypatch.setattr("rlinf_actors.exhaustion.start", no_thread)
    Gate(Station(Io(), "id-a", "a:0", host="here", devices=Devices()), peer, Box()).open(lambda gate: None)
    assert peer.sent == [frames.Ask(7)]


def test_no_thread_to_ship_with_fails_what_waits_and_the_next_goes(gate, peer, monkeypatch):
    """Both where the receiver's facts arrive and where a send begins on the loop's thread."""

    def no_thread(thread):
        raise RuntimeError("can't start new thread: pids.max is met")

    monkeypatch.setattr(gate._station.io, "inside", lambda: True, raising=False)
    with monkeypatch.context() as short:
        short.setattr("rlinf_actors.exhaustion.start", no_thread)
        early, late = parcel(large()), parcel(large())
        gate.post(early)
        peer.say(facts(backends=[]))
        gate.post(late)
        for one in (early, late):
            with pytest.raises(RuntimeError, match=r"pids\.max is met"):
                one.letter.work.wait(10)
    gate.post(parcel(large()))
    assert gate.box.came.acquire(timeout=10)
    assert len(gate.box.letters) == 1


def test_what_waits_when_the_receiver_dies(gate, peer):
    waiting = [parcel(large(), f"send() {n}") for n in range(2)]
    for one in waiting:
        gate.post(one)
    peer.die()
    late = parcel(large(), "send() 2")
    gate.post(late)
    for n, one in enumerate([*waiting, late]):
        with pytest.raises(PeerDiedError, match=rf"^send\(\) {n}: b:0 was killed"):
            one.letter.work.wait()
    assert gate.ended == [gate]
    assert gate.box.letters == []


def test_staged_bytes_ride_behind_the_skeleton_and_come_back(gate, peer):
    peer.say(facts(backends=[]))
    value = torch.arange(50_000, dtype=torch.int32).view(5, 10_000).t()
    gate.post(parcel(value))
    assert gate.box.came.acquire(timeout=10)
    letter = gate.box.letters[0]
    assert [crate.path for crate in letter.cargo.crates] == ["staged"]
    assert (bytes(letter.parts[0]), len(letter.parts)) == (b"skeleton", 2)
    released = []
    arriving = tensor_transfer.Arriving(
        "x", letter.cargo, AuthenticatedParts(letter.parts), Devices(), None, lambda: released.append(1)
    )
    assert arriving.parts == [b"skeleton"]
    assert torch.equal(arriving.tensors()[0], value)
    del arriving
    assert released == []  # nothing of the sender's was lent


def test_an_error_while_it_is_made_ready_reaches_the_sender_and_the_next_goes(gate, peer):
    peer.say(facts(backends=[]))
    first, second = parcel(large()), parcel(large())
    first.hold.tensors[0] = object()
    gate.post(first)
    gate.post(second)
    with pytest.raises(AttributeError):
        first.letter.work.wait(10)
    assert gate.box.came.acquire(timeout=10)
    assert len(gate.box.letters) == 1


@pytest.mark.parametrize(
    ("known", "to_myself", "path"),
    [
        ({"devices": ["uuid-0"], "ipc": True}, False, "ipc"),
        ({"devices": ["uuid-0"], "ipc": False}, False, "staged"),
        ({"devices": ["uuid-0"], "ipc": True, "host": "there"}, False, "lane"),
        ({"devices": ["uuid-5"], "ipc": False}, False, "lane"),
        ({"devices": ["uuid-5"], "accelerator": "AMD_GPU"}, False, "staged"),
        ({"devices": ["uuid-5"], "backends": ["gloo"]}, False, "staged"),
        ({"accelerator": "NO_ACCEL", "backends": ["gloo"]}, False, "staged"),
        ({"devices": ["uuid-0"], "ipc": False}, True, "local"),
    ],
)
def test_the_way_of_a_tensor_on_an_accelerator(gate, known, to_myself, path, monkeypatch):
    if to_myself:
        monkeypatch.setattr(gate.peer, "worker_id", "id-a")
    assert gate._path(OnGpu(), facts(**known), _Load()) == path


def test_ipc_and_lanes_take_the_tensors_of_one_device(gate):
    load, known = _Load(), facts(devices=["uuid-0", "uuid-1"], ipc=True)
    assert [gate._path(OnGpu(index), known, load) for index in (0, 1, 0)] == ["ipc", "staged", "ipc"]


def test_what_was_lent_is_kept_until_it_is_released_or_the_receiver_is_gone(gate, peer, monkeypatch):
    monkeypatch.setattr(peer, "worker_id", "id-a")
    monkeypatch.setattr(gate, "_path", lambda tensor, known, load: routes.LOCAL)
    peer.say(facts())
    for _ in range(3):
        gate.post(parcel(large()))
    assert gate.lent_count == 3
    assert [letter.weight for letter in gate.box.letters] == [200_000] * 3
    assert torch.equal(gate.lent(2).tensors[0], large())
    peer.say(frames.Released(7, 2))
    peer.say(frames.Released(7, 2))
    assert gate.lent_count == 2
    peer.die()
    assert gate.lent_count == 0


def test_a_trip_ends_with_the_last_way_or_the_first_error():
    work = AsyncWork("send()")
    trip = Trip(work, 2)
    trip.held.resolve(None)
    assert not work.done()
    trip.one_done()
    assert work.wait() is None
    work = AsyncWork("send()")
    trip = Trip(work, 2)
    trip.held.reject(PeerDiedError("gone", peer="b:0"))
    trip.one_done()
    with pytest.raises(PeerDiedError):
        work.wait()
