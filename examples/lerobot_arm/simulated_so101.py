"""An SO-101 arm with a camera, as a LeRobot Robot. Its servos are simulated by servos.py, and its camera here."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from lerobot.robots import Robot, RobotConfig  # type: ignore[import-untyped]

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
HEIGHT, WIDTH = 48, 64
TARGET = (12, 50)
"""Row and column of the red target in the camera's frame."""


@RobotConfig.register_subclass("simulated_so101_follower")
@dataclass
class SimulatedSO101Config(RobotConfig):  # type: ignore[misc]
    """As of LeRobot's SO-101, whose *port* is a serial device. Here *port* is the TCP port of servos.py."""

    port: str


class Servos:
    """A connection to the servos."""

    def __init__(self, port: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(port)))
        self._answers = self._socket.makefile("r")

    def ask(self, line: str) -> list[float]:
        """Send a command, wait for its answer, and return the servos' angles in degrees."""
        self._socket.sendall(line.encode() + b"\n")
        if not (answer := self._answers.readline()):
            raise ConnectionError("the servos closed the connection")
        return [float(angle) for angle in answer.split()]

    def close(self) -> None:
        self._answers.close()
        self._socket.close()


class SimulatedSO101(Robot):  # type: ignore[misc]
    config_class = SimulatedSO101Config
    name = "simulated_so101_follower"

    def __init__(self, config: SimulatedSO101Config) -> None:
        super().__init__(config)
        self.config = config
        self._servos: Servos | None = None

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        return {**self.action_features, "front": (HEIGHT, WIDTH, 3)}

    @cached_property
    def action_features(self) -> dict[str, type]:
        return {f"{motor}.pos": float for motor in MOTORS}

    @property
    def is_connected(self) -> bool:
        return self._servos is not None

    def connect(self, calibrate: bool = True) -> None:
        if self._servos is not None:
            raise ConnectionError(f"{self} is already connected")
        self._servos = Servos(self.config.port)
        self._for_hold = Servos(self.config.port)

    @property
    def is_calibrated(self) -> bool:
        return True

    def calibrate(self) -> None:
        """Do nothing: the simulated servos know their angles."""

    def configure(self) -> None:
        """Do nothing: the simulated servos have no modes."""

    def get_observation(self) -> dict[str, Any]:
        angles = self._connected().ask("read")
        return {**dict(zip(self.action_features, angles, strict=True)), "front": frame(angles)}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        goals = {key: float(action[key]) for key in self.action_features}
        self._connected().ask("goal " + " ".join(map(str, goals.values())))
        return goals

    def hold(self) -> None:
        """Stop where the arm is, and return when the servos have confirmed that.

        It uses a connection of its own, because a thread that was stopped between a command and its answer has left
        the other connection in the middle. Any thread may call it.
        """
        self._for_hold.ask("hold")

    def disconnect(self) -> None:
        self._connected().close()
        self._for_hold.close()
        self._servos = None

    def _connected(self) -> Servos:
        if self._servos is None:
            raise ConnectionError(f"{self} is not connected")
        return self._servos


def frame(angles: list[float]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the camera's frame, RGB: the hand is white, and the target is red."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pan, lift = angles[:2]
    row, column = round(HEIGHT / 2 - lift / 2), round(WIDTH / 2 + pan / 2)
    for (at_row, at_column), color in ((TARGET, (255, 0, 0)), ((row, column), (255, 255, 255))):
        pixels[max(at_row - 1, 0) : at_row + 2, max(at_column - 1, 0) : at_column + 2] = color
    return pixels
