"""Take long bytes and bytearrays out of a pickle while it is written, so that they travel out of band like arrays.

CPython's pickler passes bytes and bytearrays of `LONG` bytes or more to its file uncopied, right behind the opcode and
the length. `split` replaces them by a call of their type with the next out-of-band buffer, which every unpickler of
protocol 5 can read. So nothing is copied here, and the receiver copies once, since bytes own their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlinf_actors.model.buffers import Buffer

LONG = 64 << 10
"""Length from which CPython's pickler does not copy bytes and bytearrays (FRAME_SIZE_TARGET)."""


def split(events: list[Any], keep: Callable[[memoryview], Buffer]) -> tuple[bytes, list[Buffer]]:
    """Return the pickle without its long bytes, and the out-of-band buffers, each passed through *keep*.

    *events* is what the pickler wrote, and its out-of-band buffers (PickleBuffer), in the order of the pickle.
    """
    if len(events) == 1 and type(events[0]) is bytes:
        return events[0], []
    chunks: list[Buffer] = []
    buffers: list[Buffer] = []
    for event in events:
        if not isinstance(event, (bytes, bytearray, memoryview)):
            buffers.append(keep(event.raw()))
            continue
        opcode = _OPCODES.get(type(event)) if len(event) >= LONG else None
        if opcode is None or not chunks or not bytes(chunks[-1][-9:]).endswith(header := opcode(len(event))):
            chunks.append(event)
            continue
        chunks[-1] = chunks[-1][: -len(header)]
        chunks.append(b"cbuiltins\n%s\n\x97\x85R" % type(event).__name__.encode())  # type(next buffer)
        buffers.append(event if type(event) is bytes else keep(memoryview(event)))
    return b"".join(chunks), buffers


def _bytes_opcode(length: int) -> bytes:
    return b"B" + length.to_bytes(4, "little") if length <= 0xFFFFFFFF else b"\x8e" + length.to_bytes(8, "little")


_OPCODES: Mapping[type, Callable[[int], bytes]] = {
    bytes: _bytes_opcode,
    bytearray: lambda length: b"\x96" + length.to_bytes(8, "little"),
}
"""What precedes bytes and bytearrays of a length in a pickle: BINBYTES or BINBYTES8, and BYTEARRAY8."""
