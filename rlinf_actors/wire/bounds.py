"""The table of bounds: the highest length of each text, list, map and byte string in a message, with its reason. Pure.

Each field of a message has one of the types below. Decoders refuse a longer value while they decode it: a list or map
before its first element is read. `refusal_text` turns the decoder's error into a text that names the field and the
bound. docs/reference/message-bounds.md and the messages of the fuzz tests are made from this table
(tests.message_bounds), and a test fails for a field without a bound. Senders must not make longer values.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar, Union

from msgspec import Meta

T = TypeVar("T")

# --- texts: characters ---

Name = Annotated[
    str, Meta(max_length=256, title="name", description="Ids and names that are made here have a few dozen characters.")
]
"""A name, id, token or kind."""
Ip = Annotated[
    str, Meta(max_length=64, title="ip", description="An IPv6 address with a scope has up to 61 characters.")
]
"""An IP address."""
Title = Annotated[
    str, Meta(max_length=1024, title="title", description="A kind of hardware, its identity, and the name of its node.")
]
"""A robot's key, or its name for people."""
Address = Annotated[
    str,
    Meta(max_length=512, title="address", description="A host name has up to 253 characters, a unix socket 107."),
]
"""An address of a socket."""
Path = Annotated[str, Meta(max_length=4096, title="path", description="PATH_MAX of Linux.")]
"""A path, or a word of a command line."""
Method = Annotated[str, Meta(max_length=1000, title="method", description="A longer name is cut by its worker.")]
"""The name of a method that runs."""
Line = Annotated[
    str, Meta(max_length=1 << 17, title="line", description="agentd cuts a line at 64 KiB, and says so at its end.")
]
"""A line of a worker's output."""
Text = Annotated[
    str, Meta(max_length=1 << 16, title="text", description="A traceback of a failed start is the longest one.")
]
"""Text for people."""
Report = Annotated[
    str, Meta(max_length=1 << 20, title="report", description="Tracebacks of users' code are cut to 256 KiB.")
]
"""Text of an error in users' code."""
MAX_KEY, MAX_VALUE, MAX_VARIABLES = 1024, 1 << 17, 4096
"""The highest lengths of the name and value of an environment variable, and the highest number of variables."""
Value = Annotated[
    str, Meta(max_length=MAX_VALUE, title="value", description="MAX_ARG_STRLEN: Linux starts no program with more.")
]
"""The value of an environment variable, or of a fact about hardware."""
Document = Annotated[
    str, Meta(max_length=8 << 20, title="document", description="JSON with a line for each rank of a large group.")
]
"""JSON that its receiver stores and passes on."""

# --- bytes ---

Handle = Annotated[
    bytes, Meta(max_length=4096, title="handle", description="CUDA's handles have 64 bytes, routing ids 255.")
]
"""An identity or handle."""
QueueKey = Annotated[
    bytes, Meta(max_length=1 << 20, title="queue key", description="A user's key of a queue, mostly a short text.")
]
"""The key of a queue of a channel in MessagePack."""

# --- lists: elements ---

Few = Annotated[
    list[T], Meta(max_length=64, title="few", description="Kinds of hardware, robots, dimensions: mostly below ten.")
]
FewOf = Annotated[
    tuple[T, ...],
    Meta(max_length=64, title="few", description="Kinds of hardware, robots, dimensions: mostly below ten."),
]
"""Few, as a tuple."""
Some = Annotated[
    list[T], Meta(max_length=1024, title="some", description="Import paths, devices or faults of one process or node.")
]
SomeOf = Annotated[
    tuple[T, ...],
    Meta(max_length=1024, title="some", description="Import paths, devices or faults of one process or node."),
]
"""Some, as a tuple."""
OfNode = Annotated[
    list[T], Meta(max_length=10_000, title="of a node", description="Workers of one node, or drivers on its machine.")
]
"""One for each worker of a node."""
Watched = Annotated[
    list[T],
    Meta(max_length=10_000, title="watched", description="Clients that one process watches; it splits longer lists."),
]
OfGroup = Annotated[
    list[T], Meta(max_length=100_000, title="of a group", description="The largest number of ranks (MAX_SIZE).")
]
"""One for each rank of a group."""
OfLaunch = Annotated[
    list[T],
    Meta(max_length=10_000, title="of a launch", description="Further workers of a launch come before it, in parts."),
]
OfCluster = Annotated[
    list[T],
    Meta(max_length=100_000, title="of a cluster", description="Nodes, groups, clients or keys that one head serves."),
]
Lines = Annotated[
    list[T], Meta(max_length=1 << 16, title="lines", description="agentd sends lines after 128 Ki characters of them.")
]
Tensors = Annotated[
    list[T], Meta(max_length=100_000, title="tensors", description="Tensors of one message; large models have 10,000.")
]
Ids = Annotated[
    list[T],
    Meta(max_length=1 << 20, title="ids", description="Answers of one turn of a loop; a chunk has 65,536 messages."),
]
"""Numbers of requests, or of blocks of memory."""

# --- maps: entries ---

Key = Annotated[
    str, Meta(max_length=MAX_KEY, title="key", description="Names of variables, labels and facts, and ids, are short.")
]
"""A key of a map. With a bound msgspec does not share equal keys of several maps, which costs 60 bytes for each."""
Variables = Annotated[
    dict[Key, Value],
    Meta(
        max_length=MAX_VARIABLES,
        title="variables",
        description="An environment has a few dozen; labels and interfaces too.",
    ),
]
"""Environment variables, labels, or network interfaces."""
Reasons = Annotated[
    dict[Key, Text], Meta(max_length=10_000, title="of a node", description="One for each worker of a node.")
]
"""Reason by worker id."""
Details = Annotated[
    dict[Key, Union[Value, int, float, bool, Some[Value], None]],
    Meta(max_length=256, title="facts", description="Fields that one kind of hardware has."),
]
"""Facts about a piece of hardware."""

_TOO_LONG = re.compile(r"Expected `(str|bytes|array|object)` of length <= (\d+) - at (`key` in )?`(\$.*)`$")
_UNITS = {"str": "characters", "bytes": "bytes", "array": "elements", "object": "entries"}


def too_long(message: str, error: str) -> str | None:
    """Return a text for people about a value that was too long; None if *error* is about something else.

    *message* is the name of the message, *error* the text of msgspec's error.
    """
    found = _TOO_LONG.search(error)
    if found is None:
        return None
    kind, most, key, place = found.groups()
    field = place.replace("$.body", "", 1).replace("$", "", 1).lstrip(".")
    return f"{'a key of ' if key else ''}{message}.{field} has more than {int(most):,} {_UNITS[kind]}"
