"""The wire format is MessagePack: another implementation reads and writes each message."""

from __future__ import annotations

import runpy
from pathlib import Path

import msgpack
import msgspec
import pytest
from test_codec import BODIES, FRAMES

from rlinf_actors.net import framing
from rlinf_actors.security.job import job_pair
from rlinf_actors.wire import control_codec, frames, payload
from rlinf_actors.wire.control_codec import Failed, Notice, Reply, Request
from rlinf_actors.wire.payload import AuthenticatedParts

ROOT = Path(__file__).resolve().parents[2]
PLAIN = [None, True, 7, -(2**63), 2**64 - 1, 1.5, "text", b"bytes"]


def kind(value):
    return type(value).__name__


@pytest.mark.parametrize("body", BODIES, ids=kind)
def test_control_messages_are_messagepack(body):
    for envelope in (Request(7, body), Reply(7, body), Notice(body)):
        read = msgpack.unpackb(control_codec.encode(envelope))
        assert read["type"] == {"Request": "req", "Reply": "rep", "Notice": "not"}[kind(envelope)]
        assert read["body"]["type"] == kind(body)
        assert control_codec.decode(msgpack.packb(read)) == envelope


def test_failed_is_messagepack():
    failed = Failed(7, "timeout", "too late", [1, 2])
    read = msgpack.unpackb(control_codec.encode(failed))
    assert read == {"type": "err", "id": 7, "kind": "timeout", "text": "too late", "missing_ranks": [1, 2]}
    assert control_codec.decode(msgpack.packb(read)) == failed


@pytest.mark.parametrize("frame", FRAMES, ids=kind)
def test_frame_headers_are_messagepack(frame):
    read = msgpack.unpackb(frames.encode(frame))
    assert read[0] == type(frame).__struct_config__.tag
    assert len(read) == 1 + len(msgspec.structs.fields(frame))
    assert frames.decode(msgpack.packb(read)) == frame


def test_chunks_are_messagepack():
    big = b"x" * framing.BIG
    records, frames_behind, end = framing.pack([(b"header", [b"small", big]), (b"next", [])])
    assert (frames_behind, end) == ([big], 2)
    read = msgpack.unpackb(records)
    assert read == [[b"header", b"small", 0], [b"next"]]
    assert framing.unpack(msgpack.packb(read), [big]) == [(b"header", [b"small", big]), (b"next", [])]


@pytest.mark.parametrize("value", PLAIN, ids=kind)
def test_plain_values_are_messagepack(value):
    parts = payload.encode(value)
    assert (msgpack.unpackb(parts[0][1:]) if parts else None) == value
    assert payload.decode(AuthenticatedParts([b"M" + msgpack.packb(value)])) == value


def test_plain_arguments_are_messagepack():
    (part,) = payload.encode_call((1, "a"), {"b": b"c"})
    assert (part[:1], msgpack.unpackb(part[1:])) == (b"A", [[1, "a"], {"b": b"c"}])
    args, kwargs = payload.decode_call(AuthenticatedParts([b"A" + msgpack.packb([[[1, {"deep": 2}]], {"b": None}])]))
    assert (list(args), kwargs) == ([[1, {"deep": 2}]], {"b": None})
    large = b"x" * 100_000
    assert payload.encode(large) == [b"B", large]


def test_example_client_derives_the_jobs_key_pair():
    derived = runpy.run_path(str(ROOT / "examples" / "wire_client.py"))["job_curve"]("the token")
    pair = job_pair("the token")
    assert derived == (pair.public.encode(), pair.public.encode(), pair.secret.encode())
