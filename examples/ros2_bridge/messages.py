"""Messages of ROS 2 as plain dataclasses, with the names and fields of sensor_msgs, so that only the bridge needs ROS.

rclpy's own messages cannot be sent to a worker whose machine has no ROS. These can.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

M = TypeVar("M")

ENCODINGS: dict[str, tuple[str, int]] = {
    "mono8": ("u1", 1), "rgb8": ("u1", 3), "bgr8": ("u1", 3), "rgba8": ("u1", 4), "bgra8": ("u1", 4),
    "mono16": ("u2", 1), "16UC1": ("u2", 1), "32FC1": ("f4", 1),
}  # fmt: skip
"""By encoding of an image: numpy's type of one channel, and the number of channels."""


@dataclass
class Time:
    """builtin_interfaces/msg/Time."""

    sec: int = 0
    nanosec: int = 0


@dataclass
class Header:
    """std_msgs/msg/Header."""

    stamp: Time = field(default_factory=Time)
    frame_id: str = ""


@dataclass
class JointState:
    """sensor_msgs/msg/JointState: radians or meters, radians or meters per second, newton meters or newtons."""

    header: Header = field(default_factory=Header)
    name: list[str] = field(default_factory=list)
    position: list[float] = field(default_factory=list)
    velocity: list[float] = field(default_factory=list)
    effort: list[float] = field(default_factory=list)


@dataclass
class Image:
    """sensor_msgs/msg/Image. A row has *step* bytes, which may be more than its pixels need."""

    header: Header = field(default_factory=Header)
    height: int = 0
    width: int = 0
    encoding: str = ""
    is_bigendian: int = 0
    step: int = 0
    data: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def pixels(self) -> NDArray[Any]:
        """Return the pixels as an array (height, width, channels), or (height, width) for one channel. No copy.

        Raises:
            ValueError: the encoding is unknown, or there are too few bytes.
        """
        if self.encoding not in ENCODINGS:
            raise ValueError(f"encoding {self.encoding!r} is not one of {', '.join(ENCODINGS)}")
        kind, channels = ENCODINGS[self.encoding]
        pixel = np.dtype(kind).newbyteorder(">" if self.is_bigendian else "<")
        if self.step < self.width * channels * pixel.itemsize or self.data.size < self.height * self.step:
            raise ValueError(
                f"{self.data.size} bytes in rows of {self.step} are too few for {self.width} x {self.height} pixels "
                f"of {self.encoding}"
            )
        rows = self.data[: self.height * self.step].reshape(self.height, self.step)
        used: NDArray[Any] = rows[:, : self.width * channels * pixel.itemsize].view(pixel)
        return used if channels == 1 else used.reshape(self.height, self.width, channels)


def from_ros(kind: type[M], message: Any) -> M:
    """Return a message of rclpy as the dataclass *kind*. Bytes are not copied."""
    values = {}
    for name, hint in get_type_hints(kind).items():
        value = getattr(message, name)
        if get_origin(hint) is np.ndarray:
            value = np.frombuffer(value, np.uint8)
        elif get_origin(hint) is list:
            value = list(value)  # rclpy has an array.array for numbers
        elif hint not in (int, str):
            value = from_ros(hint, value)
        values[name] = value
    return kind(**values)


def to_ros(value: Any, message: M) -> M:
    """Set each field of *message*, a new message of rclpy, to that of the dataclass *value*. Return *message*."""
    for one in fields(value):
        content = getattr(value, one.name)
        if is_dataclass(content):
            to_ros(content, getattr(message, one.name))
        else:
            is_bytes = isinstance(content, np.ndarray)
            setattr(message, one.name, array("B", content.tobytes()) if is_bytes else content)
    return message
