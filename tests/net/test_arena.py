"""An arena lends blocks. A block is kept until its last view ends, in the owner and in the borrower."""

from __future__ import annotations

import gc
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from descriptor_kit import descriptors

from rlinf_actors.model.buffers import keepable
from rlinf_actors.net.shared_memory import PAGE, SHARED_FROM, WARM, Arena, Borrowed

MIB = 1 << 20


@pytest.fixture
def arena():
    made = Arena(8 * MIB)
    yield made
    made.close()


def shared_memory_of(pid: int | str = "self") -> list[str]:
    """The arenas that a process has open or mapped."""
    places = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    places += [line.rsplit("/", 1)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [place for place in places if "memfd:rlinf-actors" in place]


def test_a_block_holds_a_copy(arena):
    data = bytearray(b"x" * 3 * PAGE)
    block = arena.store(data)
    data[:] = bytes(len(data))
    assert bytes(block) == b"x" * 3 * PAGE
    assert arena.used == 3 * PAGE


@pytest.mark.parametrize(
    "derive",
    [
        lambda block: block[10:20],
        lambda block: block.cast("I"),
        lambda block: block.toreadonly()[5:],
        lambda block: memoryview(block),
    ],
)
def test_any_view_keeps_the_block(arena, derive):
    view = derive(arena.store(bytes(PAGE)))
    gc.collect()
    assert arena.used == PAGE
    del view
    assert arena.used == 0


def test_numpy_arrays_keep_the_block(arena):
    numpy = pytest.importorskip("numpy")
    array = numpy.frombuffer(arena.store(bytes(PAGE)), numpy.uint8)[7:].view()
    assert arena.used == PAGE
    del array
    assert arena.used == 0


def test_a_full_arena_copies_into_memory_of_its_own_process(arena):
    blocks = [arena.store(bytes(MIB)) for _ in range(8)]
    assert arena.store(b"x") is None
    assert arena.copy(bytes(MIB)) == bytes(MIB)
    assert type(arena.copy(bytes(MIB))) is bytes
    assert arena.crowded
    blocks.clear()
    assert type(arena.copy(bytes(MIB))) is memoryview


def test_small_copies_are_bytes(arena):
    assert type(arena.copy(bytearray(SHARED_FROM - 1))) is bytes
    assert arena.used == 0


def test_numbers_of_any_type_are_stored_as_bytes(arena):
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(SHARED_FROM, dtype=numpy.float64)
    block = arena.copy(memoryview(values))
    assert numpy.frombuffer(block, numpy.float64).tolist() == values.tolist()


def test_place_returns_the_offset_of_a_block_and_none_for_other_memory(arena):
    first, second = arena.store(bytes(PAGE)), arena.store(bytes(PAGE))
    assert (arena.place(first), arena.place(second), arena.place(second[8:])) == (0, PAGE, PAGE + 8)
    borrowed = Borrowed(arena.offer)
    for other in (b"x", bytearray(1), memoryview(bytearray(1)), borrowed.view(0, 8, True, False, lambda: None)):
        assert arena.place(other) is None


def test_a_sole_borrower_shares_the_owners_memory(arena):
    block = arena.store(bytes(PAGE))
    view = Borrowed(arena.offer).view(0, PAGE, True, False, lambda: None)
    view[5] = 7
    assert block[5] == 7


def test_writes_of_one_of_several_borrowers_are_private(arena):
    block = arena.store(bytes(PAGE))
    borrowed = Borrowed(arena.offer)
    ended: list[str] = []
    view = borrowed.view(0, PAGE, False, False, lambda: ended.append("first"))
    view[5] = 7
    assert (block[5], ended) == (0, [])
    del view
    assert ended == ["first"]
    block[5] = 9
    assert borrowed.view(0, PAGE, False, False, lambda: None)[5] == 9  # the first borrower's write is not visible


def test_a_view_outlives_its_owner(arena):
    borrowed = Borrowed(arena.offer)
    arena.store(b"still here")
    view = borrowed.view(0, 10, True, False, lambda: None)
    del borrowed
    arena.close()
    assert bytes(view) == b"still here"


def test_views_outside_the_arena_are_refused(arena):
    borrowed = Borrowed(arena.offer)
    for offset, size in ((-1, 2), (0, arena.size + 1), (arena.size, 1), (0, 0)):
        with pytest.raises(ValueError, match="outside an arena"):
            borrowed.view(offset, size, True, False, lambda: None)


def test_a_descriptor_of_something_else_is_refused_without_being_opened(arena, tmp_path):
    """The descriptor may be a robot's serial port, and opening that resets the robot."""
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    ends = select.poll()
    ends.register(reader, select.POLLIN)
    with pytest.raises(OSError, match="is not the arena that was offered"):
        Borrowed(msgspec.structs.replace(arena.offer, fd=reader))
    assert ends.poll(0) == [], "the pipe was opened"
    os.close(reader)


def test_a_file_other_than_the_offered_one_is_refused(arena):
    with pytest.raises(OSError, match="not the arena"):
        Borrowed(msgspec.structs.replace(arena.offer, inode=1))
    with pytest.raises(OSError, match="No such file"):
        Borrowed(msgspec.structs.replace(arena.offer, fd=987654))


def test_unsealed_memory_is_refused():
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE)
        found = os.fstat(fd)
        made = Arena(PAGE)
        offer = msgspec.structs.replace(made.offer, fd=fd, device=found.st_dev, inode=found.st_ino, size=PAGE)
        made.close()
        with pytest.raises(OSError, match="not sealed"):
            Borrowed(offer)
    finally:
        os.close(fd)


def test_keepable_copies_parts_of_a_crowded_arena_only(arena):
    arena.store(bytes(PAGE))
    borrowed = Borrowed(arena.offer)
    plain = borrowed.view(0, 8, True, False, lambda: None)
    crowded = borrowed.view(0, 8, True, True, lambda: None)
    assert keepable(plain) is plain
    assert type(keepable(crowded)) is bytearray
    assert type(keepable(b"small")) is bytearray


def test_idle_memory_goes_back_to_the_system():
    arena = Arena(WARM + 16 * MIB)

    def resident() -> int:
        return os.fstat(arena.offer.fd).st_blocks * 512

    block = arena.store(bytes(WARM + 8 * MIB))
    assert resident() >= WARM + 8 * MIB
    arena.trim()
    assert bytes(block[:4]) == bytes(4)
    assert resident() >= WARM + 8 * MIB
    del block
    arena.trim()
    assert resident() == WARM
    arena.close()


def test_close_leaves_no_shared_memory_open_or_mapped(arena):
    arena.store(bytes(PAGE))
    borrowed = Borrowed(arena.offer)
    arena.close()
    del borrowed
    gc.collect()
    assert shared_memory_of() == []


def test_another_process_opens_the_arena(arena):
    arena.store(b"seen by another process")
    code = (
        "import sys; from rlinf_actors.net.shared_memory import Borrowed, Offer\n"
        "print(bytes(Borrowed(Offer(*map(int, sys.argv[1:]))).view(0, 23, True, False, lambda: None)).decode())"
    )
    arguments = [str(value) for value in msgspec.structs.astuple(arena.offer)]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "seen by another process"


def test_borrowed_arena_keeps_no_descriptor_and_is_unmapped_at_its_end():
    arena = Arena(16 * PAGE)
    block = arena.store(b"x" * 100)
    there = descriptors()
    borrowed = Borrowed(arena.offer)
    view = borrowed.view(arena.place(block), 100, False, False, lambda: None)
    assert not descriptors() - there
    mappings = len(re.findall("memfd:rlinf-actors", Path("/proc/self/maps").read_text()))
    del borrowed
    assert bytes(view) == b"x" * 100, "a view outlives the arena"
    del view
    gc.collect()
    assert len(re.findall("memfd:rlinf-actors", Path("/proc/self/maps").read_text())) == mappings - 2
    arena.close()


def test_garbage_of_a_cycle_can_read_its_views_until_the_end():
    """The garbage collector calls the finalizers of a cycle in any order."""
    code = """if 1:
        import gc
        from rlinf_actors.net.shared_memory import Arena, Borrowed

        class Holder:
            def __del__(self):
                print(bytes(self.view[-3:]))

        arena = Arena(1 << 20)
        block = arena.store(b"seen" * 50_000)
        borrowed = Borrowed(arena.offer)
        holder = Holder()
        holder.myself = holder
        holder.view = borrowed.view(arena.place(block), 200_000, True, False, lambda: None)
        del borrowed, holder
        gc.collect()
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "b'een'"
