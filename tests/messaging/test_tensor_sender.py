"""TensorSender: messages wait for the receiver's facts, each tensor gets its path, and its end fails them all."""

from __future__ import annotations

import dataclasses
import threading

import pytest

torch = pytest.importorskip("torch")

from rlinf_actors.errors import PeerDiedError  # noqa: E402
from rlinf_actors.messaging import routes  # noqa: E402
from rlinf_actors.messaging.outbox import OutgoingMessage  # noqa: E402
from rlinf_actors.messaging.tensor_receiver import IncomingTensors, TensorReceiver  # noqa: E402
from rlinf_actors.messaging.tensor_sender import TensorSender, _Plan  # noqa: E402
from rlinf_actors.messaging.tensor_transfer import DetachedTensors, TransferEndpoint  # noqa: E402
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
        self.messages = []
        self.came = threading.Semaphore(0)

    def post(self, message):
        self.messages.append(message)
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

    def ccl_facts(self, index):
        return routes.Ccl("2.21.5", "H100", f"0000:{index}")


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
def sender(peer):
    box = Box()
    made = TensorSender(TransferEndpoint(Io(), "id-a", "a:0", host="here", devices=Devices(), overrides={}), peer, box)
    assert made.open()
    assert not made.open()
    assert peer.asked.wait(10)
    made.box = box
    return made


def message(value=None, what="send()"):
    tensors = DetachedTensors(cpu=True)
    if value is not None:
        assert tensors.take(value) == 0
    return OutgoingMessage("", [b"skeleton"], False, AsyncWork(what), tensors)


def large(fill=1.0):
    return torch.full((50_000,), fill)


def test_messages_wait_in_order_for_the_receivers_facts(sender, peer):
    sent = [message(large()), message(), message(large()), message()]
    for one in sent:
        sender.post(one)
    assert sender.box.messages == []
    peer.say(facts(backends=[]))
    for _ in sent:
        assert sender.box.came.acquire(timeout=10)
    assert [message.transfer is not None for message in sender.box.messages] == [True, False, True, False]
    assert [message.transfer.n for message in sender.box.messages if message.transfer] == [1, 2]
    assert [frame for frame in peer.sent if isinstance(frame, frames.Ask)] == [frames.Ask(7)]


@pytest.mark.parametrize("error", [OSError("libcuda is no ELF file"), AssertionError("not compiled with CUDA")])
def test_devices_that_do_not_start_block_no_send(peer, error, caplog):
    class Broken(Devices):
        def get(self):
            raise error

    sender = TensorSender(TransferEndpoint(Io(), "id-a", "a:0", host="here", devices=Broken()), peer, Box())
    sender.open()
    assert peer.asked.wait(10)
    assert peer.sent == [frames.Ask(7)], "it asks without a device of its own"
    assert str(error) in caplog.text


def test_a_missing_thread_for_the_question_blocks_no_send(peer, monkeypatch):
    def no_thread(thread):
        raise RuntimeError("can't start new thread: pids.max is met")

    monkeypatch.setattr("rlinf_actors.exhaustion.start", no_thread)
    TensorSender(TransferEndpoint(Io(), "id-a", "a:0", host="here", devices=Devices()), peer, Box()).open()
    assert peer.sent == [frames.Ask(7)]


def test_a_missing_thread_fails_waiting_messages_and_the_next_is_sent(sender, peer, monkeypatch):
    """Both where the receiver's facts arrive and where a send begins on the loop's thread."""

    def no_thread(thread):
        raise RuntimeError("can't start new thread: pids.max is met")

    monkeypatch.setattr(sender._endpoint.io, "inside", lambda: True, raising=False)
    with monkeypatch.context() as short:
        short.setattr("rlinf_actors.exhaustion.start", no_thread)
        early, late = message(large()), message(large())
        sender.post(early)
        peer.say(facts(backends=[]))
        sender.post(late)
        for one in (early, late):
            with pytest.raises(RuntimeError, match=r"pids\.max is met"):
                one.work.wait(10)
    sender.post(message(large()))
    assert sender.box.came.acquire(timeout=10)
    assert len(sender.box.messages) == 1


def test_waiting_messages_fail_when_the_receiver_dies(sender, peer):
    waiting = [message(large(), f"send() {n}") for n in range(2)]
    for one in waiting:
        sender.post(one)
    peer.die()
    late = message(large(), "send() 2")
    sender.post(late)
    for n, one in enumerate([*waiting, late]):
        with pytest.raises(PeerDiedError, match=rf"^send\(\) {n}: b:0 was killed"):
            one.work.wait()
    assert sender.box.messages == []


def test_staged_bytes_travel_behind_the_message_and_come_back(sender, peer):
    peer.say(facts(backends=[]))
    value = torch.arange(50_000, dtype=torch.int32).view(5, 10_000).t()
    sender.post(message(value))
    assert sender.box.came.acquire(timeout=10)
    first = sender.box.messages[0]
    assert [header.path for header in first.transfer.tensors] == ["staged"]
    assert (bytes(first.parts[0]), len(first.parts)) == (b"skeleton", 2)
    released = []
    receiver = TensorReceiver(TransferEndpoint(Io(), "id-b", "b:0", devices=Devices()), None, None, {})
    arriving = IncomingTensors(
        "x", first.transfer, AuthenticatedParts(first.parts), receiver, lambda: released.append(1)
    )
    assert arriving.parts == [b"skeleton"]
    assert torch.equal(arriving.tensors()[0], value)
    del arriving
    assert released == []  # nothing of the sender's was lent


def test_an_error_of_a_tensor_fails_its_message_and_the_next_is_sent(sender, peer):
    peer.say(facts(backends=[]))
    first, second = message(large()), message(large())
    first.tensors.tensors[0] = object()
    sender.post(first)
    sender.post(second)
    with pytest.raises(AttributeError):
        first.work.wait(10)
    assert sender.box.came.acquire(timeout=10)
    assert len(sender.box.messages) == 1


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
def test_the_path_of_a_tensor_on_an_accelerator(sender, known, to_myself, path, monkeypatch):
    if to_myself:
        monkeypatch.setattr(sender.peer, "worker_id", "id-a")
    assert sender._path(OnGpu(), facts(**known), _Plan()) == path


def test_no_warning_says_that_a_tensor_shared_by_ipc_travels_by_the_host(sender, caplog):
    known = facts(devices=["uuid-0"], ipc=True, ccl_version="2.21.5", model="H100", parent="0000:0")
    assert sender._path(OnGpu(), known, _Plan()) == "ipc"
    assert not caplog.messages


def test_ipc_and_lanes_take_the_tensors_of_one_device(sender):
    plan, known = _Plan(), facts(devices=["uuid-0", "uuid-1"], ipc=True)
    assert [sender._path(OnGpu(index), known, plan) for index in (0, 1, 0)] == ["ipc", "staged", "ipc"]


def test_lent_tensors_are_kept_until_released_or_the_receiver_is_gone(sender, peer, monkeypatch):
    monkeypatch.setattr(peer, "worker_id", "id-a")
    monkeypatch.setattr(sender, "_path", lambda tensor, known, plan: routes.LOCAL)
    peer.say(facts())
    for _ in range(3):
        sender.post(message(large()))
    assert len(sender._lent) == 3
    assert [message.extra_bytes for message in sender.box.messages] == [200_000] * 3
    assert torch.equal(sender.lent(2).tensors[0], large())
    peer.say(frames.Released(7, 2))
    peer.say(frames.Released(7, 2))
    assert len(sender._lent) == 2
    peer.die()
    assert len(sender._lent) == 0


def test_a_send_that_goes_two_ways_completes_with_the_last_or_fails_with_the_first():
    one = message()
    one.pending = 2
    one.settle()
    assert not one.work.done()
    one.settle()
    assert one.work.wait() is None
    one = message()
    one.pending = 2
    one.fail_for(Peer(), PeerDiedError("gone", peer="b:0"))
    one.settle()
    with pytest.raises(PeerDiedError):
        one.work.wait()


@pytest.mark.parametrize(
    ("known", "path"),
    [
        ({"ccl_version": "2.21.5", "model": "H100", "parent": "0000:9"}, routes.LANE),
        ({}, routes.LANE),
        ({"ccl_version": "2.19.3", "model": "H100", "parent": "0000:9"}, routes.STAGED),
        ({"ccl_version": "2.21.5", "model": "A100", "parent": "0000:9"}, routes.STAGED),
        ({"ccl_version": "2.21.5", "model": "H100", "parent": "0000:0"}, routes.STAGED),
    ],
)
def test_accelerators_that_the_ccl_cannot_connect_use_staging(peer, known, path, caplog):
    sender = TensorSender(TransferEndpoint(Io(), "id-a", "a:0", "here", devices=Devices()), peer, Box())
    found = [sender._path(OnGpu(), facts(**known), _Plan()) for _ in range(3)]
    assert found == [path] * 3
    assert caplog.text.count("travel by the host's memory") == (path == routes.STAGED)


@pytest.mark.parametrize(("backend", "by_link"), [("gloo", True), ("nccl", False)])
def test_only_gloo_has_its_store_by_the_link(sender, peer, backend, by_link, request):
    peer.say(facts())
    kept, close, address, _ = sender._new_store(backend, 1, "127.0.0.1", 5.0)
    request.addfinalizer(close)
    assert (kept is not None) == (address == "127.0.0.1:0") == by_link
