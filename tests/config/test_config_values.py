"""Values of the configuration against the annotations of a dataclass."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any, Literal, Optional

import pytest

from rlinf_actors.config.config_values import build
from rlinf_actors.errors import ConfigError


class Kind(enum.Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass
class Camera:
    serial: str
    rate: int = 30


@dataclass
class Arm:
    ip: str
    port: int = 0
    gain: float = 1.0
    dry: bool = False
    kind: Kind = Kind.LEFT
    mode: Literal["a", "b"] = "a"
    serials: Optional[list[str]] = None  # noqa: UP045 - as people write it
    pair: tuple[int, ...] = ()
    limits: dict[str, float] = field(default_factory=dict)
    camera: Camera | None = None
    cameras: list[Camera] = field(default_factory=list)
    address: IPv4Address | None = None
    anything: Any = None
    sloppy: str = None  # type: ignore[assignment]  # as people write it

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ValueError("port is too large")


def test_fitting_values_are_converted() -> None:
    made = build(
        Arm,
        {
            "ip": "10.0.0.1",
            "port": "80",  # as oc.env gives it
            "gain": 2,
            "dry": "true",
            "kind": "right",
            "mode": "b",
            "serials": ["1", "2"],
            "pair": [1, 2],
            "limits": {"x": 1},
            "camera": {"serial": "7"},
            "cameras": [{"serial": "8", "rate": 5}, Camera("9")],
            "address": "not checked here",
            "anything": object,
            "sloppy": None,
        },
        "arm",
    )
    assert made == Arm(
        "10.0.0.1",
        80,
        2.0,
        True,
        Kind.RIGHT,
        "b",
        ["1", "2"],
        (1, 2),
        {"x": 1.0},
        Camera("7"),
        [Camera("8", 5), Camera("9")],
        "not checked here",  # type: ignore[arg-type]
        object,
    )


@pytest.mark.parametrize(
    ("given", "path", "message"),
    [
        ({"ip": 1}, "arm.ip", "is 1; it must be a text (quote it)"),
        ({"ip": "x", "port": "many"}, "arm.port", "is 'many'; it must be a whole number"),
        ({"ip": "x", "port": True}, "arm.port", "is True; it must be a whole number"),
        ({"ip": "x", "port": 70000}, "arm", "Arm refuses it: port is too large"),
        ({"ip": "x", "dry": 1}, "arm.dry", "is 1; it must be true or false"),
        ({"ip": "x", "kind": "up"}, "arm.kind", "is 'up'; it must be one of left, right"),
        ({"ip": "x", "mode": "c"}, "arm.mode", "is 'c'; it must be one of a, b"),
        ({"ip": "x", "serials": [1]}, "arm.serials[0]", "is 1; it must be a text (quote it)"),
        ({"ip": "x", "serials": "1"}, "arm.serials", "is '1'; it must be a list of texts"),
        ({"ip": "x", "pair": [1, "a"]}, "arm.pair[1]", "is 'a'; it must be a whole number"),
        ({"ip": "x", "limits": {"x": "far"}}, "arm.limits", "is {'x': 'far'}; it must be a mapping to numbers"),
        ({"ip": "x", "camera": {"serial": "7", "rat": 1}}, "arm.camera.rat", "did you mean 'rate'?"),
        ({"ip": "x", "camera": {}}, "arm.camera", "has no serial, which Camera needs"),
        ({"ip": "x", "camera": 5}, "arm.camera", "is 5; it must be a mapping"),
        ({"ip": "x", "cameras": [{"serial": 8}]}, "arm.cameras[0].serial", "is 8; it must be a text"),
        ({"port": 1}, "arm", "has no ip, which Arm needs"),
        ({"ip": "x", "prt": 1}, "arm.prt", "unknown key 'prt'; did you mean 'port'?"),
    ],
)
def test_each_fault_names_its_field(given: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Arm, given, "arm")
    assert caught.value.path == path
    assert message in str(caught.value)


def test_annotations_that_cannot_be_resolved_are_not_checked() -> None:
    class Hidden:
        pass

    @dataclass
    class Local:
        size: Hidden
        ip: str = ""

    assert build(Local, {"size": 5, "ip": 7}, "x") == Local(5, 7)  # type: ignore[arg-type]
