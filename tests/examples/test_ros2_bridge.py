"""The example ros2_bridge: its messages field by field, and its node over a stand-in for rclpy (fake_ros.py)."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from array import array
from pathlib import Path
from types import ModuleType

import fake_ros
import numpy as np
import pace
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ros2_bridge"


@pytest.fixture(scope="module")
def messages() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("messages")


def joint_state() -> fake_ros.JointState:
    made = fake_ros.JointState()
    made.header.stamp.sec, made.header.stamp.nanosec, made.header.frame_id = 12, 345, "base"
    made.name, made.position, made.effort = ["pan", "lift"], array("d", [0.5, -1.5]), [0.25]
    return made


def image(pixels: np.ndarray, encoding: str, padding: int = 0, big: bool = False) -> fake_ros.Image:
    made = fake_ros.Image()
    rows = np.ascontiguousarray(pixels, pixels.dtype.newbyteorder(">" if big else "<")).view(np.uint8)
    rows = np.pad(rows.reshape(len(pixels), -1), [(0, 0), (0, padding)])
    made.height, made.width, made.step = *pixels.shape[:2], rows.shape[1]
    made.encoding, made.is_bigendian, made.data = encoding, int(big), array("B", rows.tobytes())
    return made


def test_each_field_of_a_joint_state_is_converted(messages):
    got = messages.from_ros(messages.JointState, joint_state())
    header = messages.Header(messages.Time(12, 345), "base")
    assert got == messages.JointState(header, ["pan", "lift"], [0.5, -1.5], [], [0.25])
    back = messages.to_ros(got, fake_ros.JointState())
    assert messages.from_ros(messages.JointState, back) == got
    assert back.position == array("d", [0.5, -1.5])


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(
    ("encoding", "kind", "channels"),
    [("rgb8", "u1", 3), ("bgra8", "u1", 4), ("mono8", "u1", 1), ("16UC1", "u2", 1), ("32FC1", "f4", 1)],
)
@pytest.mark.parametrize("big", [False, True])
def test_pixels_of_an_image(messages, encoding, kind, channels, padding, big):
    pixels = np.arange(6 * channels).reshape((2, 3) if channels == 1 else (2, 3, channels)).astype(kind)
    got = messages.from_ros(messages.Image, image(pixels, encoding, padding, big))
    assert np.array_equal(got.pixels(), pixels)
    back = messages.to_ros(got, fake_ros.Image())
    assert back.data == image(pixels, encoding, padding, big).data
    assert (back.height, back.width, back.step, back.encoding) == (2, 3, got.step, encoding)


def test_an_image_that_cannot_be_read_says_why(messages):
    with pytest.raises(ValueError, match="encoding 'yuv422' is not one of mono8"):
        messages.Image(encoding="yuv422").pixels()
    with pytest.raises(ValueError, match="5 bytes in rows of 3 are too few for 1 x 2 pixels of rgb8"):
        messages.Image(height=2, width=1, encoding="rgb8", step=3, data=np.zeros(5, np.uint8)).pixels()


PACKAGES = {
    "rclpy/__init__.py": "*",
    "rclpy/executors.py": "ExternalShutdownException",
    "rclpy/qos.py": "qos_profile_sensor_data",
    "rclpy/signals.py": "SignalHandlerOptions",
    "sensor_msgs/__init__.py": "",
    "sensor_msgs/msg.py": "Image, JointState",
}


@pytest.mark.live
def test_without_ros_the_program_ends_and_says_what_to_do(tmp_path):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("RLINF_HEAD", "PYTHONPATH"))}
    ran = subprocess.run(
        [sys.executable, str(FOLDER / "main.py")], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env={**clean, "XDG_STATE_HOME": str(tmp_path)}, timeout=pace.PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "ModuleNotFoundError: No module named 'rclpy'. The bridge needs ROS 2: run `source /opt/ros/" in ran.stderr


@pytest.mark.live
def test_a_policy_drives_a_robot_by_the_bridge(messages, tmp_path, monkeypatch):
    for name, names in PACKAGES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"from fake_ros import {names}\n" if names else "")
    topics = tmp_path / "topics"
    topics.mkdir()
    monkeypatch.setenv("FAKE_ROS", str(topics))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RLINF_HEAD")}
    path = os.pathsep.join(map(str, (tmp_path, FOLDER, Path(__file__).parent)))
    commanded: list[fake_ros.JointState] = []
    robot = fake_ros.Node("robot")
    robot.create_subscription(fake_ros.JointState, "/joint_commands", commanded.append, 10)
    states = robot.create_publisher(fake_ros.JointState, "/joint_states", 10)
    images = robot.create_publisher(fake_ros.Image, "/camera/image_raw", 10)
    white = image(np.full((48, 64, 3), 255, np.uint8), "rgb8")
    with subprocess.Popen(
        [sys.executable, str(FOLDER / "main.py"), "--steps", "3"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        env={**clean, "PYTHONPATH": path}, text=True,
    ) as program:  # fmt: skip
        try:
            subscribed = [topics / name for name in ("joint_states", "camera.image_raw")]
            pace.again_like(lambda: [len(list(one.iterdir())) for one in subscribed], [1, 1])
            state = joint_state()
            for _ in range(3):
                states.publish(state)
                images.publish(white)
                fake_ros.spin_once(robot, timeout_sec=pace.PATIENCE_S)
                state.position = commanded[-1].position
            out, _ = program.communicate(timeout=pace.PATIENCE_S)
        finally:
            program.kill()
            robot.destroy_node()
    assert program.returncode == 0
    assert out == "3 commands, 0 messages dropped; the last: [0.8, -1.2]\n"
    assert [one.name for one in commanded] == [["pan", "lift"]] * 3
    assert commanded[0].header.frame_id == "base"
    assert commanded[0].position == array("d", [0.6, -1.4])
