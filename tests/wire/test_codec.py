"""Control messages and headers: well-formed ones are decoded, all others raise RemoteWireError."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlinf_actors.errors import ProtocolError, RemoteWireError, UsageError
from rlinf_actors.wire import control_codec, frames, template_protocol
from rlinf_actors.wire.agent_messages import (
    AgentHello,
    Beat,
    ClientHello,
    Flushing,
    FlushLogs,
    Goodbye,
    HardwareFound,
    LeaseEnded,
    LogCredit,
    LogLines,
    LookForHardware,
    OutputLost,
    ProcessGone,
    StartWorkers,
    StopLooking,
    StopWorkers,
    Unwatch,
    Watch,
    Welcome,
    WorkerExited,
    WorkerReady,
    WorkersHealth,
)
from rlinf_actors.wire.check_values import (
    CheckAnswer,
    CheckQuestion,
    Holder,
    Interface,
    Interpreter,
    LogUse,
    NodeFacts,
    PathAnswer,
    PathTest,
    Transfer,
)
from rlinf_actors.wire.client_messages import (
    ClientGone,
    Detach,
    Done,
    Drained,
    DrainNode,
    EndGroup,
    Enumerated,
    EnumerateHardware,
    EStop,
    EStopped,
    Events,
    FindGroup,
    GetEvents,
    GetNodes,
    GetStatus,
    Handles,
    KillWorker,
    Launch,
    Launched,
    Nodes,
    Status,
    StopCluster,
    StopGroup,
    Warn,
    WatchClients,
    WorkerChanged,
    WorkerKilled,
)
from rlinf_actors.wire.control_codec import Body, Failed, Notice, Reply, Request, encode, number_of, verb_of
from rlinf_actors.wire.debug_values import (
    DebugAnswer,
    DebugQuestion,
)
from rlinf_actors.wire.event_values import ClusterEvent
from rlinf_actors.wire.figure_values import (
    ChannelFigures,
    DeviceFigures,
    DiskFigures,
    FigureQuestion,
    MethodFigures,
    NodeFigures,
    PathFigures,
    ProcessFigures,
    WorkerFigures,
)
from rlinf_actors.wire.key_messages import AddKey, Enroll, Enrolled, GetKeys, Keys, KeyState, RevokeKey, RotateKey
from rlinf_actors.wire.launch_messages import FindWorker, FoundWorker, LaunchPart, WorkerBatch, WorkerRow
from rlinf_actors.wire.log_values import LogFile, LogMark, LogQuestion, LogSlice
from rlinf_actors.wire.node_questions import AgentAnswered, AskAgent, AskNode, NodeAnswered
from rlinf_actors.wire.resize_messages import AddRanks, ResizeGroup
from rlinf_actors.wire.stack_values import Stack, StackAnswer, StackFrame, StackQuestion, Wait, WorkerStacks
from rlinf_actors.wire.trace_values import SwitchedWorkers, TraceQuestion, TraceSlice, TraceSwitch
from rlinf_actors.wire.values import (
    Endpoint,
    ExitReport,
    Extension,
    GroupHandle,
    GroupState,
    HardwareAnswer,
    HardwareQuestion,
    Identity,
    NodeReport,
    NodeState,
    Piece,
    RobotStop,
    RunningWorker,
    WorkerHealth,
    WorkerSpec,
    WorkerState,
)

NODE = NodeReport("id", "host", "127.0.0.1", "key", 2, 1 << 30, "3.11", "/usr/bin/python3")
SPEC = WorkerSpec("w-0", "g", "ns", 0, 1, 0, {"A": "1"})
STATE = WorkerState("w-0", 0, 0, "127.0.0.1", "running", 7, Endpoint("key", "ipc:///x", "tcp://127.0.0.1:1"))

QUESTION = HardwareQuestion("Arm", 1, "[{}]", env={"A": "1"}, extensions=[Extension("lab", "g", "lab 1.0")])
ANSWER = HardwareAnswer([Piece("Arm", "v1", "lab:Info", "{}", "ip", [Identity("ip", 1)])])
STACKS = WorkerStacks(
    "w-0", "step", 5.5, 1, [Wait("recv() from g:1", 3.5, ["g:1"], "MainThread", True, 9.0)],
    [Stack("MainThread", [StackFrame("/a.py", 3, "C.step")]), Stack("t", is_task=True, count=3)], 2,
)  # fmt: skip

FIGURES = NodeFigures(
    [WorkerFigures(
        "w-0", ProcessFigures(1.5, 1 << 20, 3, 9), "step", 0.5, 2, [MethodFigures("step", 3, 1, 0.5, [1, 2])],
        [PathFigures("shared", 1, 1 << 20)], 100, 1, ChannelFigures(3, 300, 1, 1, 0, 0, 0, 9, 10, 1 << 30), 0.001,
    ), WorkerFigures("w-1", fault="it has ended")],
    ProcessFigures(), 100.0, 8, 0.5, 1 << 34, 1 << 33, 0.001, [DeviceFigures("NV_GPU", 50, 60, 1 << 36, 1 << 30)], 3.0,
    [DiskFigures("logs", "/var/log", 1 << 40, 1 << 39)], 0.5,
)  # fmt: skip

FACTS = NodeFacts(
    "1.0", [Interpreter("/p", "3.11", {"torch": "2.9"}, True)], [Interface("eth0", "10.0.0.1", 24, True, 1500, 10000)],
    (1024, 4096), -1, 99, [1 << 30, 1 << 29], 1, "/py-spy", False, "/cg", {"memory": "why"}, True,
    LogUse(DiskFigures("logs", "/l", 1 << 40, 1 << 39), 5, 3, 1), [Holder(0, 7, 1 << 30, "ended")], ["x"], 2, 8, 1,
)  # fmt: skip

BODIES = [
    AgentHello(1, "0.1", "inc", NODE, True, [RunningWorker(SPEC, "owner")]),
    ClientHello(1, "0.1", "inc", "driver", "ns", "key", 1, 2),
    Welcome("e", "0.1", 1.0, 10.0, "tok"),
    Goodbye("done"),
    Beat("x"),
    GetNodes(3, 1.5),
    Nodes([NodeState(NODE, "inc", 0, "ready", 0.0)], ["careful"]),
    Launch("ns", "g", "m:C", [SPEC]),
    Detach("ns", "g", ["w-0"]),
    LaunchPart(
        "ns",
        "g",
        "w",
        0,
        [WorkerBatch(SPEC, [WorkerRow("w-0", 0, 0), WorkerRow("w-1", 1, 0, {"RANK": "1"}, (), (0,), "always")])],
    ),
    FindWorker("ns", "g", 3),
    FoundWorker(),
    FoundWorker(STATE, 2),
    EndGroup("ns", "g", 1.0, "kim@lab", "it is not needed"),
    KillWorker("ns", "g", "g-0", "kim@lab", "it hangs"),
    WorkerKilled(),
    Launched(GroupState("ns", "g", "m:C", "o", "running", [STATE])),
    FindGroup("ns", "g"),
    StopGroup("ns", "g", 1.0),
    AddRanks("ns", "g", [SPEC]),
    ResizeGroup("ns", "g", "w", 3, "detail", False, 1.0),
    Handles([GroupHandle("ns", "g", [STATE])]),
    GetStatus(),
    Status("e", "0.1", 1.0, [], [], []),
    EStop("kim@lab", "a hand in the cell", "ns", True),
    EStopped([RobotStop("env:0", "ns", ["Franka 10.10.10.1"], "n1", False)], ["emergency stop by kim@lab"]),
    StopCluster(),
    Done(),
    StartWorkers([SPEC], "o"),
    StopWorkers(["w-0"], 1.0),
    Watch("inc", 1, 2),
    Unwatch("inc"),
    ProcessGone("inc"),
    WorkerReady("w-0", 7, Endpoint("key")),
    WorkerExited("w-0", ExitReport("signalled", None, 9, "yes", ["oops"])),
    LeaseEnded("w-0", "it was sent SIGTERM"),
    LogLines("o", "n", [("g:0", "out", "hello")], 3),
    LogCredit("o", "n", 10),
    FlushLogs("ns", 2.0),
    Flushing(3),
    WorkerChanged("ns", "g", [STATE]),
    WatchClients(["inc"]),
    ClientGone("inc"),
    Warn("careful"),
    EnumerateHardware("id", QUESTION),
    Enumerated(ANSWER),
    LookForHardware("e-1", QUESTION),
    HardwareFound("e-1", ANSWER),
    StopLooking("e-1"),
    AskNode("id", TraceQuestion("ns", "w-0", 5)),
    NodeAnswered(TraceSlice(data=b"x", now=3.5, clock=[(1.0, 2.0, 0.5)])),
    AskAgent("e-2", TraceQuestion("ns", drop=True)),
    AgentAnswered("e-2", TraceSlice(["w-0"], fault="x")),
    AskNode("id", LogQuestion("ns", "g-0.out", 5, 7, 1.5, 2.0)),
    NodeAnswered(LogSlice([LogFile("ns", "g-0.out", 0, 1.5, True, 7, [LogMark(0, 1.5, "id")])], 1)),
    AskAgent("e-5", LogQuestion()),
    AgentAnswered("e-5", LogSlice([], 0, b"x", 6, 7, ended=True, lost=True, fault="f", marks=[LogMark(5, 1.5)])),
    AskNode("id", TraceSwitch("ns", 1024)),
    NodeAnswered(SwitchedWorkers(3, 1, ["g:0: no room"])),
    AskAgent("e-4", TraceSwitch("ns")),
    AgentAnswered("e-4", SwitchedWorkers(1)),
    AskNode("id", StackQuestion("ns", ["w-0"])),
    NodeAnswered(StackAnswer([STACKS])),
    AskAgent("e-3", StackQuestion("ns", ["w-0"])),
    AgentAnswered("e-3", StackAnswer([STACKS, WorkerStacks("w-1", fault="it has ended")])),
    AskNode("id", DebugQuestion("ns", "w-0", "s", "kim@lab", 2, "p x\n", 1, 40, 5.0, True)),
    NodeAnswered(DebugAnswer("w-0", "waits", 1, "train.py:42 in step", "MainThread", True, "7\n", 40, 1, runs_s=2.5)),
    AskAgent("e-6", DebugQuestion("ns", "w-0", "s")),
    AgentAnswered("e-6", DebugAnswer("w-0", fault="it has ended")),
    AskNode("id", FigureQuestion()),
    NodeAnswered(FIGURES),
    AskAgent("e-4", FigureQuestion("ns")),
    AgentAnswered("e-4", FIGURES),
    AskNode("id", CheckQuestion(path=PathTest("measure", "10.0.0.2", "", "n2", 40000, b"s", 1 << 20, 0.5))),
    NodeAnswered(CheckAnswer(1.5, FACTS)),
    AskAgent("e-6", CheckQuestion(facts=True)),
    AgentAnswered(
        "e-6", CheckAnswer(1.5, path=PathAnswer(1, b"s", "10.0.0.1", Transfer(1, 0.5), rtt_s=0.1, heard=True))
    ),
    DrainNode("id", "kim@lab", "new disk", True),
    Drained(NodeState(NODE, "inc", 0, "draining", 0.0, draining="new disk")),
    WorkersHealth([WorkerHealth("w-0", "it does not answer", for_s=5.5)]),
    OutputLost("w-0", "No space left on device"),
    GetEvents(3, "e", "ns", 10, 5.0),
    Events("e", 1.5, [ClusterEvent(4, 1.25, "worker_died", "it died", exit=ExitReport("signalled", None, 9))], 4, 2),
    EStop("somebody on host", "smoke", "ns"),
    EStopped([RobotStop("w-0", "ns", ["Franka ip"], "n0", True)], ["all robots"]),
    Enroll("x" * 40),
    RotateKey("x" * 40, 60.0),
    Enrolled("agent", "n1", "not written"),
    AddKey("x" * 40, "driver", "kim", "root@head", 900.0),
    RevokeKey("kim", "root@head", "driver"),
    GetKeys(),
    Keys([KeyState("x" * 40, "agent", "n1", 1.5, "kim", True, 2.5, 3.5, "used")], "h", ["tcp://10.0.0.1:6380"], 4.5),
]


def test_every_message_type_has_an_example():
    assert {type(body) for body in BODIES} == set(typing.get_args(Body))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_message_survives_encoding(body):
    for envelope in (Notice(body), Request(1, body), Reply(2, body)):
        assert control_codec.decode(control_codec.encode(envelope)) == envelope


def test_failed_survives_encoding():
    failed = Failed(3, "timeout", "no", [1, 2], "cluster.x")
    assert control_codec.decode(memoryview(control_codec.encode(failed))) == failed


GOOD = control_codec.encode(Request(1, Launch("ns", "g", "m:C", [SPEC])))


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 5000)
@example(b"\x81" * 5000)
def test_random_bytes_raise_a_wire_error(data):
    with pytest.raises(RemoteWireError):
        control_codec.decode(data)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_message_with_one_wrong_byte_decodes_or_raises_a_wire_error(at, byte):
    data = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    try:
        envelope = control_codec.decode(data)
    except RemoteWireError:
        return
    assert isinstance(envelope, (Request, Reply, Failed, Notice))


@given(st.integers(0, len(GOOD) - 1))
def test_truncated_message_raises_a_wire_error(length):
    with pytest.raises(RemoteWireError):
        control_codec.decode(GOOD[:length])


def launch(id):
    """A launch of one worker with this id. Files are named by the id."""
    body = Launch("ns", "g", "m:C", [msgspec.structs.replace(SPEC, id=id)])
    return msgspec.to_builtins(body)


def test_a_launch_is_decoded():
    assert control_codec.decode(msgspec.msgpack.encode({"type": "req", "id": 1, "body": launch("0123456789-12.3")}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "req", "id": "one", "body": {"type": "Done"}},
        {"type": "req", "id": 1},
        {"type": "req", "id": 1, "body": {"type": "Nonsense"}},
        {"type": "nonsense", "id": 1, "body": {"type": "Done"}},
        {"type": "req", "id": 1, "body": {"type": "GetNodes", "num_nodes": 1.5}},
        {"type": "req", "id": 1, "body": {"type": "Launch", "namespace": "n", "group": "g", "cls": "c", "workers": 3}},
        *(
            {"type": "req", "id": 1, "body": launch(id)}
            for id in ("", ".", "../t/x", "/etc/x", "a\0b", "a\n", "x" * 65)
        ),
        [1, 2],
        "text",
        None,
    ],
)
def test_wrong_fields_raise_a_wire_error(wrong):
    with pytest.raises(RemoteWireError):
        control_codec.decode(msgspec.msgpack.encode(wrong))


def test_deep_nesting_raises_a_wire_error():
    with pytest.raises(RemoteWireError):
        control_codec.decode(b"\x82\xa4type\xa3not\xa4body" + b"\x91" * 100_000 + b"\xc0")


def test_message_that_is_too_long_is_refused_unparsed():
    with pytest.raises(RemoteWireError, match="limit"):
        control_codec.decode(b"\xc0" * (control_codec.MAX_CONTROL_BYTES + 1))


def test_message_that_is_too_long_is_refused_by_the_encoder():
    spec = WorkerSpec("w-0", "g", "ns", 0, 1, 0, {"BIG": "x" * 1000})
    launch = Request(1, Launch("ns", "g", "m:C", [spec]))
    assert control_codec.decode(control_codec.encode(launch)) == launch
    with pytest.raises(UsageError, match=r"a Launch of 1,\d\d\d bytes is not sent: the limit is 1,000: .*env_vars"):
        control_codec.encode(launch, 1000)
    with pytest.raises(UsageError, match=r"a Failed of .* bytes is not sent: the limit is 10$"):
        control_codec.encode(Failed(1, "usage", "much to say"), 10)


def test_wire_error_is_a_protocol_error():
    assert issubclass(RemoteWireError, ProtocolError)


FRAMES = [
    frames.Join(1, "0.1", "3.11", "driver:x", "tok", "w-0"),
    frames.Rejected("protocol", "no"),
    frames.Create(1, "m:C", {"A": "1"}, 2),
    frames.Call(2, "step", 1.5),
    frames.Stream(3, "roll", 16),
    frames.Credit(3, 8),
    frames.Cancel(2),
    frames.Ok(2, 0.5),
    frames.Item(3),
    frames.Raised(2, "raised", "ValueError", "boom", "Traceback"),
    frames.WhatRuns(5),
    frames.Runs(5, "step", 2.5, 3),
    frames.WhereIs(5, [1, 0]),
    frames.ChildIs(5, "w-0_1", Endpoint("h", "ipc:///run/w-0_1", "tcp://10.0.0.1:4242")),
    frames.Resized(3),
    frames.SharedCall(5, "step", 1.5),
    frames.ShareParts(5, [frames.Sibling("a:1", "w-1", 7, Endpoint("key", "ipc:///x", "tcp://127.0.0.1:1"))]),
    frames.SharedParts("abc", 5),
    frames.WantParts(5),
    frames.Calls([5, 6], "step", 1.5),
    frames.Oks([5, 6], [0.5, 0.25]),
    frames.Relayed(
        5, [(1, [b"1", b"2"])], [frames.RelayedLink(b"1", "ipc:///run/w/w-1", b"driver:x#1", "a:1")], [b"3"], [(b"", 9)]
    ),
    frames.ChildEnded(5, "w-0_1", ExitReport("signalled", signal=9)),
    frames.Memory(17, 5, 1, 99, 4096, True),
    frames.Dropped([1, 2]),
    frames.Shown(2, 17, 5, 1, 99, 4096, True),
    frames.Opened(2),
    frames.Hidden(2),
    frames.UserMessage(4, 1, "a:0", "w-0", "", 1000),
    frames.Held(4, 1),
    frames.Returned(4, 1000),
    frames.Written(4, 1, 1 << 22),
    frames.ChannelPut(5, b"k", 1.5, True),
    frames.ChannelGet(6, b"k", False),
    frames.ChannelBatch(7, b"k", 2),
    frames.ChannelAck([6, 7]),
    frames.ChannelCancel(6, True),
    frames.ChannelLook(8, b"k"),
    frames.ChannelShow(9, "counts"),
    frames.ChannelClose(10),
    frames.ChannelWhere(11, b"k", 1),
    frames.ChannelGet(12, b"k", False, "a:0 on n1"),
    frames.ChannelShow(13, "drain", b"k"),
    frames.ChannelPut(15, b"k", 0, False),
    frames.ChannelPuts([16, 18], b"k", [0, 1.5]),
    frames.ChannelGets([17, 19], b"k"),
    frames.ChannelAccepted([16, 18]),
    frames.ChannelItems([17, 19]),
    frames.ChannelRelease(14, 12),
    frames.ChannelRelease(0, 12, "ValueError: no"),
    frames.UserMessage(
        4, 1, "a:0", "w-0", "", 1000,
        frames.TensorTransfer(
            5, 1, [frames.TensorHeader("bool", [2, 3], False, "cuda", "ipc", b"h", 8)], 1, "nccl", "h:1", [None, 4]
        ),
    ),
    frames.Ask(5),
    frames.Facts(5, "host", "NV_GPU", ["uuid"], ["gloo", "nccl"], True),
    frames.Released(5, 1),
    frames.LaneEnded(5, 1, "w-0", "it broke"),
    frames.LaneKey(5, 1, "job/0/0", b"address"),
    frames.BroadcastFailed("stream", 3, "w:0", "it broke", "w:1"),
]  # fmt: skip


def test_long_pong_of_a_worker_is_refused():
    """Pulses contains the Pongs of all workers: a long one could end the template and with it other jobs' workers."""
    good = template_protocol.Pong("w-0", "m" * template_protocol.TEXT_CHARS)
    assert template_protocol.decode_to_agent(template_protocol.encode(good)) == good
    with pytest.raises(RemoteWireError):
        template_protocol.decode_to_agent(
            template_protocol.encode(template_protocol.Pong("w-0", "m" * (template_protocol.TEXT_CHARS + 1)))
        )


def test_every_header_survives_encoding():
    assert {type(frame) for frame in FRAMES} == set(typing.get_args(frames.AnyFrame))
    for frame in FRAMES:
        assert frames.decode(frames.encode(frame)) == frame


@given(st.binary(max_size=100))
@example(b"")
@example(b"\x91" * 100_000)
def test_random_header_decodes_or_raises_a_wire_error(data):
    try:
        frame = frames.decode(data)
    except RemoteWireError:
        return
    assert isinstance(frame, frames.Frame)


@given(st.binary(max_size=100))
@example(b"\x91" * 100_000)
def test_random_packets_of_templates_raise_a_wire_error(data):
    for decode in (template_protocol.decode_to_template, template_protocol.decode_to_agent):
        with pytest.raises(RemoteWireError):
            decode(data)


def test_verb_and_number_are_read_without_decoding():
    for body in (Beat("i", 1.0, 2.0), GetStatus(), EStop("me", "why"), Goodbye()):
        verb = type(body).__name__.encode()
        assert verb_of(encode(Notice(body))) == verb
        for number in (0, 127, 2**15, 2**63 - 1):
            assert (verb_of(encode(Request(number, body))), number_of(encode(Request(number, body)))) == (verb, number)
    assert (verb_of(encode(Failed(1, "usage", "type Beat"))), number_of(encode(Notice(Goodbye())))) == (b"", None)
    assert (verb_of(b""), verb_of(b"\xa4body"), number_of(b"\xc1")) == (b"", b"", None)
