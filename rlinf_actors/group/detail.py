"""What the launching process writes into the head's record of a group, for those who attach. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from rlinf_actors.errors import ProtocolError
from rlinf_actors.hardware.pieces import piece_of
from rlinf_actors.model.hardware import HardwareInfo
from rlinf_actors.model.node import NodeInfo
from rlinf_actors.model.placement import Placement
from rlinf_actors.placement.environment import model_seen
from rlinf_actors.wire.values import Piece

_PLAIN = Placement(-1, -1, -1)
"""Fields that are like its own are left out: the record goes to every node of the group."""


class GroupDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """Travels as JSON in Launch.detail.

    Attributes:
        placements: of the ranks, in their order.
        nodes: for each rank the name of its node.
        models: for each rank the model of its accelerators, "" for a rank without any.
        hardware: by rank the robots or other hardware it was placed on; ranks without any are left out.
        restarts: False if a worker that failed is not started again; an older launcher does not say it.
    """

    placements: list[Placement] = []
    nodes: list[str] = []
    models: list[str] = []
    hardware: dict[int, list[Piece]] = {}
    restarts: bool = True


def detail_of(
    placements: Sequence[Placement],
    nodes: Sequence[NodeInfo],
    names: Sequence[str],
    hardware: Mapping[int, Sequence[HardwareInfo]],
    restarts: bool = True,
) -> GroupDetail:
    """The record of a group.

    Args:
        placements: in rank order.
        nodes: for each rank its node.
        names: for each rank what messages to people call that node.
        hardware: by rank the robots or other hardware it was placed on.
        restarts: whether a worker that failed is started again.
    """
    models = [model_seen(placement, node) for placement, node in zip(placements, nodes, strict=True)]
    pieces = {rank: [piece_of(info) for info in infos] for rank, infos in hardware.items()}
    return GroupDetail(list(placements), list(names), models, pieces, restarts)


def encode(detail: GroupDetail) -> str:
    """As JSON."""
    placements = [
        {
            field.name: value
            for field in fields(one)
            if (value := getattr(one, field.name)) != getattr(_PLAIN, field.name)
        }
        for one in detail.placements
    ]
    found: dict[str, Any] = {"placements": placements, "nodes": detail.nodes, "models": detail.models}
    if detail.hardware:
        found["hardware"] = detail.hardware
    if not detail.restarts:
        found["restarts"] = False
    return msgspec.json.encode(found).decode()


def decode(text: str, group: str) -> GroupDetail:
    """Read it; nothing in it for a group whose launcher wrote none.

    Raises:
        ProtocolError: it is something else than `encode` writes.
    """
    if not text:
        return GroupDetail()
    try:
        return msgspec.json.decode(text, type=GroupDetail)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"the head's record of group {group!r} is not what launch() writes: {error}") from error
