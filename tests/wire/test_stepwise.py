"""Long control messages are decoded in steps, with the result and the errors of the other decoder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rlinf_actors.errors import RemoteWireError
from rlinf_actors.wire import agent_messages, client_messages, launch_messages, node_questions, values
from rlinf_actors.wire.control_codec import BoundError, Notice, Request, decode, encode
from rlinf_actors.wire.figure_values import NodeFigures, WorkerFigures
from rlinf_actors.wire.protocol import MAX_ASKED_BYTES, MAX_CONTROL_BYTES
from rlinf_actors.wire.stepwise import WHOLE, decode_in_steps

ENV = {f"NAME_{n}": "value" for n in range(20)}
SPEC = values.WorkerSpec("w", "g", "ns", 0, 1, 0, ENV, sys_path=("/a",))
NODE = values.NodeReport("n", "h", "1.2.3.4", "host", 1, 1, "3.11", "python")
STATE = values.WorkerState("w", 0, 0, "1.2.3.4", "gone", exit=values.ExitReport("exited", 1))
LONG = {
    "launch": client_messages.Launch("ns", "g", "m:C", [SPEC] * 500),
    "one large worker": client_messages.Launch(
        "ns", "g", "m:C", [msgspec.structs.replace(SPEC, env={"A": "x" * WHOLE, "B": "y" * WHOLE})]
    ),
    "part": launch_messages.LaunchPart(
        "ns", "g", "l", 0, [launch_messages.WorkerBatch(SPEC, [launch_messages.WorkerRow("w", 1, 1, ENV)] * 500)]
    ),
    "hello": agent_messages.AgentHello(
        6, "1", "i", NODE, workers=[values.RunningWorker(SPEC, "o", "m:C")] * 300, ended={"w": "why"}
    ),
    "handles": client_messages.Handles([values.GroupHandle("ns", "g", [STATE] * 2000)]),
    "lines": agent_messages.LogLines("ns", "n", [("g:0", "out", "text")] * 10_000),
    "answer": node_questions.AgentAnswered("i", NodeFigures([WorkerFigures("w", method="step")] * 10_000)),
    "ids": client_messages.StopGroup("ns", "g", 1.0, [f"worker-{n}" for n in range(10_000)]),
}


def run(data: bytes) -> tuple[Any, int]:
    """Return the decoded message, and the number of yields."""
    steps, count = decode_in_steps(data), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


@pytest.mark.parametrize("name", LONG)
def test_steps_give_the_result_of_the_other_decoder(name: str) -> None:
    for envelope in (Request(7, LONG[name]), Notice(LONG[name])):
        data = encode(envelope, MAX_CONTROL_BYTES)
        assert len(data) > WHOLE
        decoded, count = run(data)
        assert decoded == envelope == decode(data)
        assert count > len(data) / WHOLE


def _changed(path: str, value: object) -> bytes:
    """Return a long launch with another value at *path* of its last worker."""
    plain = msgspec.msgpack.decode(encode(Request(7, LONG["launch"])))
    plain["body"]["workers"][-1][path] = value
    return msgspec.msgpack.encode(plain)


@pytest.mark.parametrize(
    ("path", "value"),
    [("group", "x" * 257), ("sys_path", ["/a"] * 1025), ("rank", "one"), ("env", {"A": 1}), ("env", {"A" * 2000: "1"})],
)
def test_steps_raise_the_errors_of_the_other_decoder(path: str, value: object) -> None:
    data = _changed(path, value)
    with pytest.raises(RemoteWireError) as whole:
        decode(data)
    with pytest.raises(RemoteWireError) as steps:
        run(data)
    assert str(steps.value) == str(whole.value)
    assert type(steps.value) is type(whole.value)
    assert getattr(steps.value, "request", None) == getattr(whole.value, "request", None)


def test_a_list_beyond_its_bound_is_refused_before_its_elements() -> None:
    names = msgspec.msgpack.encode({"type": "not", "body": {"type": "WatchClients", "incarnations": [0] * 100_000}})
    with pytest.raises(BoundError, match=r"WatchClients.incarnations has more than 10,000 elements"):
        run(names)


def test_a_message_with_too_many_bytes_is_refused_unread() -> None:
    data = encode(Request(7, client_messages.WatchClients(["x" * MAX_ASKED_BYTES])))
    with pytest.raises(BoundError, match=r"bytes, and may have") as refused:
        run(data)
    assert (refused.value.message, refused.value.request) == ("WatchClients", 7)
    with pytest.raises(RemoteWireError):
        run(b"\x00" * len(data))


@pytest.mark.parametrize(
    "plain",
    [
        [0] * WHOLE,
        {"type": "not", "body": [0] * WHOLE},
        {"type": "not", "body": {str(n): 0 for n in range(WHOLE)}},
        {"type": "not", "body": {"type": "Unknown", "x": "x" * WHOLE}},
        {"type": "req", "body": {"type": "GetStatus", "x": "x" * WHOLE}},
        {"type": "rep", "id": 1, "body": {"type": "Done", "x": "x" * WHOLE}},
        {"type": "req", "id": "1", "body": {"type": "GetStatus", "x": "x" * WHOLE}},
        {"type": "not", "body": {"type": "Launch", "x": "x" * WHOLE}},
    ],
)
def test_what_is_no_message_is_refused(plain: object) -> None:
    with pytest.raises(RemoteWireError):
        run(msgspec.msgpack.encode(plain))
