"""Pieces of hardware from the process that found them to the driver, as plain values."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.configured import info_of, piece_of
from rlinf_actors.hardware.probe_report import ReportedInfo
from rlinf_actors.hardware.robots.franka import FrankaConfig, FrankaHWInfo
from rlinf_actors.model.hardware import HardwareConfig, HardwareInfo
from rlinf_actors.wire.values import Identity, Piece


class Grip(enum.Enum):
    TWO = 2
    THREE = 3


@dataclass
class Base(HardwareConfig):
    port: str = ""


@dataclass
class Special(Base):
    """A subclass of what the info's annotation names."""

    grip: Grip = Grip.TWO


@dataclass
class Lens:
    width: float
    modes: tuple[str, ...] = ()


@dataclass
class Info(HardwareInfo):
    config: Base
    lenses: list[Lens] = field(default_factory=list)
    grip: Grip | None = None
    path: Any = None
    moves: int = field(default=0, init=False)

    @property
    def identity(self) -> str:
        return self.config.port


def travelled(info: HardwareInfo) -> Piece:
    """Through the process's answer and both control messages."""
    piece = msgspec.json.decode(msgspec.json.encode(piece_of(info)), type=Piece)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(piece), type=Piece)


@pytest.mark.parametrize(
    "info",
    [
        HardwareInfo("Arm", "v1"),
        Info("Arm", "v1", Base(3, "/dev/a")),
        Info(
            "Arm", "v1", Special(3, "/dev/a", Grip.THREE), [Lens(1.5, ("a", "b")), Lens(2)], Grip.TWO, [1 << 70, None]
        ),
        FrankaHWInfo("Franka", "FR3", FrankaConfig(0, robot_ip="10.0.0.1", camera_serials=["1"])),
    ],
)
def test_an_info_survives_the_wire(info: HardwareInfo) -> None:
    found = info_of(travelled(info))
    assert found == info
    assert type(found) is type(info)
    assert found.identity == info.identity
    if isinstance(found, Info) and isinstance(info, Info):
        assert type(found.config) is type(info.config)


def test_a_value_that_is_not_plain_arrives_as_text() -> None:
    found = info_of(travelled(Info("Arm", "v1", Base(0), path={"at": PurePosixPath("/x"), 3: {"y"}})))
    assert isinstance(found, Info)
    assert found.path == {"at": "/x", "3": ["y"]}


@pytest.mark.parametrize("cls", ["", "lab_pkg:ArmInfo"])
def test_identities_are_those_that_the_node_found(cls: str) -> None:
    info = Info("Arm", "v1", Base(3, "/dev/a"))
    info.identities = (Identity("ttyUSB0", 3), Identity("SN 7"))
    piece = travelled(info)
    found = info_of(msgspec.structs.replace(piece, cls=cls or piece.cls))
    assert isinstance(found, ReportedInfo if cls else Info)
    assert list(info_of(travelled(found)).identities) == list(info.identities)


def test_an_unknown_class_keeps_its_values_and_name() -> None:
    piece = msgspec.structs.replace(travelled(Info("Arm", "v1", Special(3, "/dev/a"))), cls="lab_pkg:ArmInfo")
    found = info_of(piece)
    assert isinstance(found, ReportedInfo)
    assert (found.type, found.model, found.identity) == ("Arm", "v1", "/dev/a")
    assert found.detail["config"] == Special(3, "/dev/a")
    again = info_of(travelled(found))
    assert (again, again.identity) == (found, "/dev/a")


def test_a_name_that_came_over_the_wire_is_not_imported() -> None:
    found = info_of(Piece("Arm", "v1", "antigravity:Lift", '{"class of these fields": "this:Zen", "a": 1}'))
    assert isinstance(found, ReportedInfo)
    assert dict(found.detail) == {"a": 1}


def test_another_version_of_the_class_is_an_error_that_says_so() -> None:
    piece = travelled(Info("Arm", "v1", Base(0)))
    newer = msgspec.structs.replace(piece, detail='{"config": {"node_rank": 0}, "torque": 1}')
    with pytest.raises(
        ConfigError, match=r"unknown key 'torque'.*is the same version of its package installed"
    ) as caught:
        info_of(newer, "cluster.node_groups[0].hardware")
    assert caught.value.path == "cluster.node_groups[0].hardware"


def test_the_class_of_a_built_in_type_is_imported_when_needed() -> None:
    code = (
        "import json, sys; from rlinf_actors.hardware.configured import info_of; "
        "from rlinf_actors.wire.values import Piece; "
        "assert 'rlinf_actors.hardware.robots.franka' not in sys.modules; "
        "print(type(info_of(Piece(**json.loads(sys.argv[1])))).__name__)"
    )
    piece = piece_of(FrankaHWInfo("Franka", "FR3", FrankaConfig(0, robot_ip="10.0.0.1")))
    given = json.dumps(msgspec.to_builtins(piece))
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("FrankaHWInfo\n", "")
