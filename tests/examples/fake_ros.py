"""Stands in for rclpy and the messages of ROS 2, for test_ros2_bridge.py, which lays them out as packages.

Topics are unix datagram sockets below the directory FAKE_ROS, so nodes of several processes meet. As in rclpy, a
message checks what its fields are set to, numbers become array.array, callbacks run in spin(), and spin() raises after
shutdown().
"""

from __future__ import annotations

import enum
import os
import pickle
import selectors
import socket
from array import array
from pathlib import Path
from typing import Any

# --- messages ---


class _Message:
    FIELDS: dict[str, Any] = {}
    """By field: its class, or for a sequence the class of its elements in a list, or array.array's type code."""

    def __init__(self) -> None:
        for name, kind in self.FIELDS.items():
            empty = array(kind) if isinstance(kind, str) else [] if isinstance(kind, list) else kind()
            object.__setattr__(self, name, empty)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self.FIELDS[name]
        if isinstance(kind, str):
            if not (isinstance(value, array) and value.typecode == kind):
                assert all(isinstance(one, int if kind == "B" else float) for one in value), name
                value = array(kind, value)
        elif isinstance(kind, list):
            assert all(isinstance(one, kind[0]) for one in value), name
        else:
            assert isinstance(value, kind), name
        object.__setattr__(self, name, value)


class Time(_Message):
    FIELDS = {"sec": int, "nanosec": int}


class Header(_Message):
    FIELDS = {"stamp": Time, "frame_id": str}


class JointState(_Message):
    FIELDS = {"header": Header, "name": [str], "position": "d", "velocity": "d", "effort": "d"}


class Image(_Message):
    FIELDS = {
        "header": Header, "height": int, "width": int, "encoding": str, "is_bigendian": int, "step": int, "data": "B",
    }  # fmt: skip


# --- rclpy ---


class ExternalShutdownException(Exception):
    """Raised by spin() after shutdown()."""


class SignalHandlerOptions(enum.Enum):
    NO = 0
    ALL = 3


qos_profile_sensor_data = object()
_nodes: list[Node] = []


class _Publisher:
    def __init__(self, kind: type, topic: str) -> None:
        self._kind, self._folder = kind, _folder(topic)

    def publish(self, message: Any) -> None:
        assert type(message) is self._kind
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for subscriber in self._folder.iterdir():
                sender.sendto(pickle.dumps(vars(message)), str(subscriber))


class Node:
    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)

    def create_publisher(self, kind: type, topic: str, qos: Any) -> _Publisher:
        return _Publisher(kind, topic)

    def create_subscription(self, kind: type, topic: str, callback: Any, qos: Any) -> None:
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.bind(str(_folder(topic) / str(os.getpid())))

        def receive() -> None:
            message = kind()
            message.__dict__.update(pickle.loads(receiver.recv(1 << 20)))  # noqa: S301
            callback(message)

        self._selector.register(receiver, selectors.EVENT_READ, receive)

    def destroy_node(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()


def _folder(topic: str) -> Path:
    folder = Path(os.environ["FAKE_ROS"], topic.strip("/").replace("/", "."))
    folder.mkdir(exist_ok=True)
    return folder


def init(*, signal_handler_options: SignalHandlerOptions = SignalHandlerOptions.ALL) -> None:
    assert signal_handler_options is SignalHandlerOptions.NO, "rclpy would take the worker's signals"


def create_node(name: str) -> Node:
    _nodes.append(Node(name))
    return _nodes[-1]


def spin_once(node: Node, *, timeout_sec: float | None = None) -> None:
    for key, _ in node._selector.select(timeout_sec):
        if key.data is None:
            raise ExternalShutdownException
        key.data()


def spin(node: Node) -> None:
    while True:
        spin_once(node)


def try_shutdown() -> None:
    for node in _nodes:
        node._wake.send(b"!")
