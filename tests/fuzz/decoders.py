"""Every decoder of bytes from a socket or a person, with its expected exceptions and its seeds."""

from __future__ import annotations

import contextlib
import random
import typing
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from lies import Liar
from zmq.utils import z85

from rlinf_actors.codesync import tree
from rlinf_actors.errors import ConfigError, ProtocolError, RemoteWireError
from rlinf_actors.group import group_spec
from rlinf_actors.model.placement import Placement
from rlinf_actors.net import authentication, bulk, bulk_framing, framing, stream_framing
from rlinf_actors.net.buffer_lending import Lending
from rlinf_actors.net.shared_memory import SHARED_FROM, Arena
from rlinf_actors.security import job
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import Member
from rlinf_actors.wire import control_codec, frames, stepwise, template_protocol
from rlinf_actors.wire.control_codec import Envelope

NUMBERS = tuple(n.to_bytes(8, "big") for n in (0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1))
MARKS = (b"\xc0", b"\xc1", b"\xc4\xff", b"\xc6\xff\xff\xff\xff", b"\xcb\x7f\xf8" + b"\0" * 6, b"\xcf", b"\xd3\x80",
         b"\xd9\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x80", b"\x90",
         b"\xa0", b"\xff", b"\x91" * 2000, b"\x81\xa1a" * 700, b"\xc9\xff\xff\xff\xff\x01")  # fmt: skip
"""Beginnings of MessagePack values that claim more bytes than they have, or nest deeply."""


@dataclass(frozen=True)
class Decoder:
    """One decoder: `decode` returns, or raises one of `refuses` (RemoteWireError is a ProtocolError)."""

    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    refuses: tuple[type[Exception], ...] = (RemoteWireError,)

    def check(self, data: bytes) -> bool:
        """True if *data* was decoded. An unexpected exception is a bug and escapes."""
        try:
            self.decode(data)
        except self.refuses:
            return False
        return True


def _said(kinds: Any, count: int = 2) -> tuple[bytes, ...]:
    """Messages of each kind of a union."""
    found = typing.get_args(kinds) or (kinds,)
    return tuple(Liar(n).say(kind) for kind in found for n in range(count))


_RECORDS, _BIG, _ = framing.pack([(b"h", [b"p", bytes(framing.BIG)]), (b"", [])])
_STREAM = stream_framing.prefix(_RECORDS, [memoryview(part) for part in _BIG]) + _RECORDS + b"".join(_BIG)


def _unchunk(data: bytes) -> object:
    return framing.unpack(data, [bytes(1), bytes(2)])


def _headers(data: bytes) -> object:
    """Decode a chunk of the control plane in both ways: what both accept is the same."""
    found = list(framing.headers(data))
    assert [(header, []) for header in found] == framing.unpack(data, [])
    return found


def _unstream(data: bytes) -> object:
    """Decode *data* as all of a stream. Bytes that the stream does not have yet are a refusal too."""
    reader = stream_framing.ChunkReader(1 << 20)
    chunks = list(reader.feed(data))
    if reader.place is not None or reader.held or not chunks:
        raise RemoteWireError("more must come")
    return [framing.unpack(records, big) for records, big in chunks]


def _lent(data: bytes) -> object:
    with _borrower() as near:
        parts: list[Any] = [b"first", b"second"]
        return near.unpack(data, parts)


@contextlib.contextmanager
def _borrower() -> Iterator[Lending]:
    """One end of a connection that lends to itself."""
    arena = Arena(4 * SHARED_FROM)
    try:
        offer = arena.offer
        near = Lending(arena, lambda function: None, lambda frame, parts=(): None, "peer")
        near.heard(frames.Memory(offer.pid, offer.fd, offer.device, offer.inode, offer.size, True))
        yield near
    finally:
        arena.close()


def _leases() -> tuple[bytes, ...]:
    with _borrower() as lender:
        header, _ = lender.pack(b"header", [b"", bytes(SHARED_FROM)])
        assert header != b"header"
        return (header,)


_PAIR = KeyPair.make()
_DOMAIN = b"rlinf-actors.1"
_ZAP = (b"1.0", b"7", _DOMAIN, b"10.0.0.1", b"", b"CURVE", z85.decode(_PAIR.public))


class _OneKey:
    """A gate that knows one key."""

    def admit(self, public_key: str) -> Member | None:
        return Member("driver", "kim", "", public_key) if public_key == _PAIR.public else None

    def refused(self, public_key: str, address: str, why: str = "", times: int = 1) -> None:
        raise AssertionError("judging has no effects")


_HANDSHAKE = bulk_framing.BulkHandshake(*(bytes([n]) * size for n, size in enumerate((16, 32, 16, 16))))
_REGIONS = bulk_framing.regions_of([3 << 20, 5000, 700, bulk_framing.PIECE])


def _bulk_hello(data: bytes) -> object:
    """Whatever a stranger says at a bulk port, only the holder of the session's secret is admitted."""
    if len(data) != bulk_framing.HELLO:
        raise RemoteWireError("more must come, or was not read")
    bulk_framing.session_of(data)
    made = bulk_framing.accept(data, _HANDSHAKE.secret, _HANDSHAKE.accepting)
    assert (made.session, made.connecting) == (_HANDSHAKE.session, _HANDSHAKE.connecting), "let in"
    return made


def _bulk_piece(data: bytes) -> object:
    """The headers of the pieces of one transfer: no two have the same place, and none is outside."""
    received = bulk_framing.Received(_REGIONS)
    size = 0
    for start in range(0, len(data), bulk_framing.HEADER):
        if len(data) - start < bulk_framing.HEADER:
            raise RemoteWireError("more must come")
        header = bulk_framing.decode_header(data[start : start + bulk_framing.HEADER])
        received.add(header)
        assert header.offset + header.size <= _REGIONS[header.region].size
        size += header.size
    assert received.complete == (size == sum(region.size for region in _REGIONS))
    return received


_PIECES = tuple(header.encode() for header in bulk_framing.pieces_of(1, _REGIONS))
_cut = msgspec.msgpack.Decoder(list[bytes]).decode


def _zap(data: bytes) -> object:
    """A ZAP request is a list of frames: take them from a MessagePack list if the data is one."""
    try:
        request = _cut(data)
    except msgspec.DecodeError:
        request = data.split(b"\0")
    verdict = authentication.judge(request, {_DOMAIN.decode(): _OneKey()})
    assert len(verdict.reply) == 6
    if verdict.reply[2] != b"200":
        raise RemoteWireError(verdict.why)
    assert [*request[:1], request[2], *request[5:]] == [b"1.0", _DOMAIN, *_ZAP[5:]], "let in"
    return verdict


_TOKEN = job.JoinToken("10.0.0.1:6380", _PAIR.public, _PAIR, "agent", "n1").text().encode()
_DETAIL = group_spec.encode(group_spec.GroupDetail([Placement(0, 0, 0)], ["n0"], [""])).encode()


def _group_detail(data: bytes) -> object:
    return group_spec.decode(data.decode(errors="replace"), "g")


_CODE = tree.build({name: tree.FileFacts(1, bytes(32), name == "run") for name in ("run", "pkg/a.py", "pkg/sub/b")})


def _tree_of_code(data: bytes) -> object:
    """Whatever a sender of code says, no path of its tree leaves the tree."""
    listings = {**_CODE.listings, tree.digest_of(data): data}
    found = tree.expand(tree.digest_of(data), listings.get, tree.TreeLimits(entries=1000))
    for path in [*found.files, *found.directories]:
        assert not {"", ".", ".."} & set(path.split("/")), path
    return found


def _in_steps(data: bytes) -> object:
    """Decode a control message in steps, also a short one: what both decoders accept is the same."""
    whole, stepwise.WHOLE = stepwise.WHOLE, 8
    try:
        for _ in (steps := _Result(stepwise.decode_in_steps(data))):
            pass
    finally:
        stepwise.WHOLE = whole
    with contextlib.suppress(RemoteWireError):
        assert control_codec.encode(control_codec.decode(data)) == control_codec.encode(steps.value)
    return steps.value


class _Result:
    """A generator, and what it has returned."""

    def __init__(self, generator: Generator[None, None, Any]) -> None:
        self._generator = generator

    def __iter__(self) -> Iterator[None]:
        self.value = yield from self._generator


DECODERS = {
    "long_control": Decoder(_in_steps, _said(typing.Union[control_codec.Request, control_codec.Notice], 40)),
    "control": Decoder(control_codec.decode, _said(Envelope, 60)),
    "header": Decoder(frames.decode, _said(frames.AnyFrame)),
    "to_template": Decoder(template_protocol.decode_to_template, _said(template_protocol.ToTemplate)),
    "to_agent": Decoder(template_protocol.decode_to_agent, _said(template_protocol.ToAgent)),
    "to_worker": Decoder(template_protocol.decode_to_worker, _said(template_protocol.ToWorker)),
    "control_chunk": Decoder(_headers, (framing.pack([(b"h", []), (b"", []), (b"x" * 300, [])])[0],)),
    "chunk": Decoder(_unchunk, (framing.pack([(b"h", [b"p", bytes(framing.BIG)]), (b"", [])])[0],)),
    "stream": Decoder(_unstream, (_STREAM, _STREAM * 3)),
    "bulk": Decoder(bulk._decode, _said(bulk.AnyMessage, 20)),
    "bulk_hello": Decoder(_bulk_hello, (_HANDSHAKE.hello(),)),
    "bulk_piece": Decoder(_bulk_piece, (*_PIECES, b"".join(_PIECES), b"".join(reversed(_PIECES)))),
    "lent": Decoder(_lent, _leases()),
    "zap": Decoder(_zap, (msgspec.msgpack.encode(_ZAP),)),
    "join_token": Decoder(lambda data: job.parse(data.decode(errors="replace")), (_TOKEN,), (ConfigError,)),
    "group_detail": Decoder(_group_detail, (_DETAIL,), (ProtocolError,)),
    "code_listing": Decoder(_tree_of_code, tuple(_CODE.listings.values()), (tree.TreeError,)),
}


def mutated(decoder: Decoder, choose: random.Random) -> bytes:
    """A seed changed in a few places; now and then random bytes."""
    if choose.random() < 0.05:
        return choose.randbytes(choose.randrange(200))
    data = bytearray(choose.choice(decoder.seeds))
    for _ in range(choose.randrange(1, 5)):
        at = choose.randrange(len(data) + 1)
        what = choose.randrange(6)
        if what == 0 and data:
            data[at % len(data)] = choose.randrange(256)
        elif what == 1:
            del data[at:]
        elif what == 2:
            data[at:at] = choose.choice(MARKS)
        elif what == 3:
            data[at : at + 8] = choose.choice(NUMBERS)
        elif what == 4:
            del data[at : at + choose.randrange(1, 9)]
        else:
            data[at:at] = bytes(choose.choice(decoder.seeds))[: choose.randrange(1, 200)]
    return bytes(data)
