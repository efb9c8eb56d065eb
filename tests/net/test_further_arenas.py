"""Blocks that are handed over: a producer, a host and a consumer with an arena each, and queues as connections."""

from __future__ import annotations

import gc
import os

import msgspec
import pytest
from descriptor_kit import descriptors

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.net import shared_memory
from rlinf_actors.net.buffer_lending import MARK, Lending
from rlinf_actors.net.further_arenas import GIVEN, owned
from rlinf_actors.net.shared_memory import SHARED_FROM, Arena, kept
from rlinf_actors.wire import frames

SIZE = 8 << 20
LARGE = bytes(range(256)) * (SHARED_FROM // 256)


class Connection:
    """Two ends, and the frames on their way between them."""

    def __init__(self, near: Arena, far: Arena) -> None:
        self.soon: list = []
        self.said: list = []
        self.near = Lending(near, self.soon.append, lambda frame, parts=(): self.said.append((self.far, frame)), "far")
        self.far = Lending(far, self.soon.append, lambda frame, parts=(): self.said.append((self.near, frame)), "near")
        self.near.offer()
        self.settle()

    def settle(self):
        while self.soon or self.said:
            while self.soon:
                self.soon.pop(0)()
            while self.said:
                to, frame = self.said.pop(0)
                if isinstance(frame, frames.Memory):
                    to.heard(frame)
                elif isinstance(frame, frames.Dropped):
                    to.dropped(frame)
                else:
                    to.heard_further(frame)

    def put(self, data):
        """The near end hands *data* over; the far end's view of it."""
        return self._sent(self.near, self.far, data, give=True)

    def deliver(self, part):
        return self._sent(self.far, self.near, part, alone=False)

    def _sent(self, from_, to, part, **how):
        header, sent = from_.pack(b"header", [b"", part], **how)
        received = list(sent)
        assert to.unpack(header, received) == b"header"
        self.settle()
        return received[1]


class Scene:
    def __init__(self) -> None:
        self.arenas = [Arena(SIZE) for _ in range(3)]
        self.made: list[Arena] = []
        self.arenas[0].another = self._another
        self.producer = Connection(self.arenas[0], self.arenas[1])
        self.consumer = Connection(self.arenas[2], self.arenas[1])  # the host is the far end of both

    def _another(self, limit):
        self.made.append(Arena(limit))
        return self.made[-1]

    def settle(self):
        gc.collect()
        for _ in range(3):
            self.producer.settle()
            self.consumer.settle()

    def warm(self):
        """The first items, with which both connections open what they need."""
        for _ in range(2):
            self.consumer.deliver(self.producer.put(LARGE))
        self.settle()
        return self


@pytest.fixture
def scene():
    made = Scene()
    yield made
    for arena in [*made.arenas, *made.made]:
        arena.close()


@pytest.fixture
def copies(monkeypatch):
    made: list[int] = []
    copy = shared_memory.copy

    def counted(target, source, size):
        made.append(size)
        copy(target, source, size)

    monkeypatch.setattr(shared_memory, "copy", counted)
    return made


def test_an_item_is_copied_once_from_its_producer_to_its_consumer(scene, copies):
    scene.warm()
    copies.clear()
    for _ in range(5):
        held = owned(scene.producer.put(LARGE), scene.arenas[1].copy)
        assert bytes(scene.consumer.deliver(held)) == LARGE
    assert copies == [len(LARGE)] * 5


def test_the_first_items_arrive_before_the_arena_is_open(scene):
    first = scene.producer.put(LARGE)
    assert kept(first) is None
    assert kept(owned(first, bytes)) is None
    assert bytes(scene.consumer.deliver(first)) == LARGE


def test_a_block_is_used_again_only_when_host_and_consumer_have_released_it(scene):
    scene.warm()
    given = scene.made[0]
    assert given.used == 0
    held = scene.producer.put(LARGE)
    theirs = scene.consumer.deliver(held)
    del held
    scene.settle()
    assert given.used == len(LARGE)
    other = scene.producer.put(LARGE[::-1])
    assert bytes(theirs) == LARGE
    del theirs, other
    scene.settle()
    assert given.used == 0
    again = scene.producer.put(LARGE)
    assert kept(again).place(again) == 0  # the lowest pages, which are warm


def test_an_item_stays_as_it_is_after_its_producers_connection(scene):
    scene.warm()
    held = scene.producer.put(LARGE)
    given = scene.made[0]
    block = given.store(b"x" * SHARED_FROM)  # on its way when the connection was lost
    scene.producer.near.close()
    del block
    gc.collect()
    assert given.store(LARGE[::-1]) is None
    scene.producer.far.close()
    again = Connection(scene.arenas[0], scene.arenas[1])
    for _ in range(3):
        again.put(LARGE[::-1])
    assert bytes(held) == LARGE
    assert bytes(scene.consumer.deliver(held)) == LARGE


def test_memory_of_a_gone_producer_is_freed_block_by_block(scene):
    scene.warm()
    given = scene.made[0]
    inode = os.open(f"/proc/self/fd/{given.offer.fd}", os.O_RDONLY)  # only to look at it
    first, second = scene.producer.put(LARGE), scene.producer.put(LARGE)
    theirs = scene.consumer.deliver(second)

    def blocks():
        scene.settle()
        return os.fstat(inode).st_blocks * 512

    scene.producer.near.close()
    assert blocks() >= 2 * len(LARGE)
    scene.producer.far.close()
    assert blocks() == 2 * len(LARGE)
    del first
    assert blocks() == len(LARGE)
    del second
    assert blocks() == len(LARGE)
    assert bytes(theirs) == LARGE
    assert scene.consumer.near._further._opened
    del theirs
    assert blocks() == 0
    assert not scene.consumer.near._further._opened
    assert not scene.consumer.far._further._shown
    os.close(inode)


def test_descriptors_of_a_gone_producer_are_closed(scene):
    scene.settle()
    before = descriptors()
    scene.warm()
    assert descriptors() - before
    scene.producer.near.close()
    scene.producer.far.close()
    scene.settle()
    assert not descriptors() - before


def test_a_consumer_that_is_gone_is_no_longer_told(scene):
    scene.warm()
    held = scene.producer.put(LARGE)
    source = kept(held)
    assert source.on_unused
    scene.consumer.far.close()
    assert not source.on_unused


def test_writes_of_a_consumer_are_its_own(scene):
    scene.warm()
    held = scene.producer.put(LARGE)
    theirs = scene.consumer.deliver(held)
    theirs[:4] = b"mine"
    assert bytes(held) == LARGE
    del theirs
    assert bytes(scene.consumer.deliver(held)) == LARGE


def test_a_host_copies_items_while_their_producer_has_little_room(scene, copies):
    scene.warm()
    many = [scene.producer.put(LARGE) for _ in range(SIZE // 2 // len(LARGE))]
    kinds = [kept(owned(part, bytes)) is not None for part in many]
    assert kinds == sorted(kinds, reverse=True)
    assert True in kinds
    assert False in kinds
    assert bytes(scene.producer.put(LARGE)) == LARGE  # no room: lent from the producer's other arena


@pytest.mark.parametrize("row", [(0, 1, 0, 100, 7), (0, 1, 100, 100, GIVEN), (0, 1, 1 << 40, 100, GIVEN)])
def test_wrong_places_are_refused(scene, row):
    scene.warm()
    header = MARK + msgspec.msgpack.encode([True, False, [], b"header", [row]])
    with pytest.raises(RemoteWireError, match="not in the sender's memory"):
        scene.producer.far.unpack(header, [b""])


def test_a_block_is_handed_over_once(scene):
    scene.warm()
    held = scene.producer.put(LARGE)
    header = MARK + msgspec.msgpack.encode([True, False, [], b"header", [(0, 1, 0, 100, GIVEN)]])
    with pytest.raises(RemoteWireError, match="handed over before"):
        scene.producer.far.unpack(header, [b""])
    assert bytes(held) == LARGE


def test_an_arena_that_cannot_be_opened_is_not_used(scene):
    scene.producer.near._further._make = lambda: scene.producer.said.append(
        (scene.producer.far, frames.Shown(GIVEN, os.getpid(), 0, 1, 2, 3, True))
    )
    for _ in range(3):
        assert kept(scene.producer.put(LARGE)) is None
