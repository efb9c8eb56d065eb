"""Each text, byte string, list and map in a message has a bound, with a reason, and no decoder lets a longer one in."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from msgspec.msgpack import encode

from rlinf_actors.channel.key_encoding import key_bytes
from rlinf_actors.errors import RemoteWireError, UsageError
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.control_codec import BoundError
from tests.message_bounds import PROTOCOLS, Field, fields

ALL = {title: list(fields(kind)) for title, kind in PROTOCOLS.items()}
CONTROL = next(iter(ALL.values()))
NAMED = [one for one in CONTROL if not one.place and not one.owner.__struct_config__.array_like]


def longest(field: Field, more: int = 0) -> bytes:
    """Return MessagePack of a value of the field with its greatest length, or with *more*; elements are of no type."""
    size = (field.most or 0) + more
    if field.kind == "characters":
        return encode("x" * size)
    if field.kind == "bytes":
        return encode(b"x" * size)
    return b"%c%b" % (0xDD if field.kind == "elements" else 0xDF, size.to_bytes(4, "big"))  # its elements never come


def refusal(decode: Callable[[bytes], object], data: bytes) -> str:
    try:
        decode(data)
    except msgspec.DecodeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("title", ALL)
def test_each_text_list_and_map_has_a_bound_with_a_reason(title):
    assert [one.path for one in ALL[title] if not (one.most and one.title and one.why)] == []


def test_the_walk_sees_the_fields_that_froze_the_head():
    found = {one.path: one.most for one in CONTROL}
    assert found["WatchClients.incarnations"] == 10_000
    assert found["WorkerSpec.env"]
    assert found["Launch.workers"]
    assert found["LogLines.entries[...][2]"]
    assert found["WorkerSpec.env[key]"] == 1024
    assert len(found) > 250


@pytest.mark.parametrize("field", NAMED, ids=lambda field: field.path)
def test_a_longer_value_is_refused_before_its_elements_are_read(field):
    decode = msgspec.msgpack.Decoder(field.owner).decode
    tag = {field.owner.__struct_config__.tag_field: field.owner.__struct_config__.tag}
    head = b"".join(encode(key) + encode(value) for key, value in tag.items() if key)
    name = encode(next(one.encode_name for one in msgspec.structs.fields(field.owner) if one.name == field.name))
    begin = bytes([0x81 + bool(head)]) + head + name
    assert f"of length <= {field.most}" in refusal(decode, begin + longest(field, 1))
    assert "of length" not in refusal(decode, begin + longest(field))  # other fields are missing, or the elements


def beyond(envelope: dict) -> BoundError:
    with pytest.raises(BoundError) as refused:
        control_codec.decode(encode(envelope))
    return refused.value


def test_refusal_names_message_field_and_bound():
    names = ["x"] * 200_000
    notice = beyond({"type": "not", "body": {"type": "WatchClients", "incarnations": names}})
    assert (notice.message, notice.request) == ("WatchClients", None)
    assert str(notice) == "WatchClients.incarnations has more than 10,000 elements"
    request = beyond({"type": "req", "id": 7, "body": {"type": "FindGroup", "namespace": "n" * 257, "group": "g"}})
    assert (request.message, request.request) == ("FindGroup", 7)
    assert str(request) == "FindGroup.namespace has more than 256 characters"
    launch = {"type": "Launch", "namespace": "n", "group": "g", "cls": "c", "workers": [{"env": {"A": "x" * 200_000}}]}
    assert str(beyond({"type": "req", "id": 8, "body": launch})) == (
        "Launch.workers[0].env[...] has more than 131,072 characters"
    )
    launch["workers"] = [{"env": {"A" * 2000: "x"}}]
    assert str(beyond({"type": "req", "id": 9, "body": launch})) == (
        "a key of Launch.workers[0].env has more than 1,024 characters"
    )


def test_other_faults_stay_malformed_messages():
    for data in (encode({"type": "req", "id": 1, "body": {"type": "Nope"}}), b"", b"\xc1", encode({"type": "not"})):
        with pytest.raises(RemoteWireError) as refused:
            control_codec.decode(data)
        assert not isinstance(refused.value, BoundError)


def test_a_queue_key_that_is_too_long_raises_where_it_is_given():
    with pytest.raises(UsageError, match="cannot be a channel's key: it has more than"):
        key_bytes("k" * (1 << 20))
