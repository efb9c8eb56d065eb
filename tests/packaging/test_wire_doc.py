"""docs/reference/wire.md lists messages and frames with the fields that they have."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec

from rlinf_actors.wire import frames
from rlinf_actors.wire.control_codec import Body

PAGE = Path(__file__).resolve().parents[2].joinpath("docs", "reference", "wire.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = re.split(r"^##+ ", PAGE.partition(f" {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in table[1:]]


def fields(cls: type[msgspec.Struct]) -> str:
    return ", ".join(f"{one.encode_name}{'' if one.required else '?'}" for one in msgspec.structs.fields(cls))


def test_frames_are_listed_with_their_fields() -> None:
    known = {frame.__name__: frame for frame in typing.get_args(frames.AnyFrame)}
    listed = rows("Frames")
    assert {"Join", "Call", "Ok", "Raised", "ChannelGet"} <= {name for _, name, _ in listed}
    for number, name, said in listed:
        assert [number, said] == [str(known[name].__struct_config__.tag), fields(known[name])], f"frame {name}"


def test_messages_of_clients_are_listed_with_their_fields() -> None:
    known = {body.__name__: body for body in typing.get_args(Body)}
    listed = rows("Messages of clients")
    assert {"ClientHello", "Welcome", "FindGroup", "Status"} <= {name for name, _, _ in listed}
    for name, said, _ in listed:
        assert said == fields(known[name]), f"message {name}"
