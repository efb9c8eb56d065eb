"""The paths by which a buffer travels between two workers: a table that users can print and override. No I/O here.

The first row of the table that fits decides. The sender's RLINF_ACTORS_PATHS can name another path for a kind of
buffer, which is used for every pair of workers between which that path is possible.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

SMALL, CPU, ACCELERATOR = "small", "cpu", "accelerator"
INLINE, SHARED, PIECES, LOCAL, IPC, LANE, STAGED = "inline", "shared", "pieces", "local", "ipc", "lane", "staged"
GROUP = "group"
"""The path of a broadcast's tensors by one process group of all members (`messaging.broadcast_group`)."""

MEANING: Mapping[str, str] = {
    INLINE: "copied into the message; ZeroMQ",
    SHARED: "shared memory between processes of one node",
    PIECES: "frames behind the message, read from the sender's memory; ZeroMQ",
    LOCAL: "the same memory: a worker that sends to itself",
    IPC: "the same device memory, opened by CUDA IPC; nothing is copied",
    LANE: "a process group of the two workers: the accelerator's CCL (gloo for tensors on the CPU)",
    STAGED: "copied to the host, then as a CPU buffer; back to the receiver's accelerator if it has one",
}


class Pair(msgspec.Struct, frozen=True):
    """The facts about a sender and a receiver on which the choice of a path depends.

    Attributes:
        same_process: True if sender and receiver are the same worker.
        same_node: True if they can use each other's sockets, pids and shared memory.
        same_device: True if the buffer is on a device that the receiver uses too.
        ccl: True if both have the collective library for the buffer: the accelerator's, or gloo for the CPU.
        shared: True if the receiver can open the sender's shared memory, or its device memory by CUDA IPC.
    """

    same_process: bool = False
    same_node: bool = False
    same_device: bool = False
    ccl: bool = False
    shared: bool = False


class Row(msgspec.Struct, frozen=True):
    """One row of the table of paths: a buffer of *kind* takes *path* if the Pair has the values in *needs*."""

    kind: str
    path: str
    needs: Mapping[str, bool] = msgspec.field(default_factory=dict)

    def fits(self, kind: str, pair: Pair) -> bool:
        return kind == self.kind and all(getattr(pair, column) == value for column, value in self.needs.items())


COLUMNS = Pair.__struct_fields__

TABLE: tuple[Row, ...] = (
    Row(SMALL, INLINE),
    Row(CPU, SHARED, {"same_node": True, "shared": True}),
    Row(CPU, PIECES),
    Row(ACCELERATOR, LOCAL, {"same_process": True}),
    Row(ACCELERATOR, IPC, {"same_node": True, "same_device": True, "shared": True}),
    Row(ACCELERATOR, LANE, {"same_device": False, "ccl": True}),
    Row(ACCELERATOR, STAGED),
)


def choose(kind: str, pair: Pair, overrides: Mapping[str, str]) -> str:
    """Return the path of a buffer.

    Args:
        kind: SMALL (below 128 KiB, on the CPU), CPU or ACCELERATOR.
        pair: the sender and the receiver.
        overrides: path by kind, as in Settings.paths.
    """
    wanted = overrides.get(kind)
    if wanted is not None and _possible(wanted, pair):
        return wanted
    return next(row.path for row in TABLE if row.fits(kind, pair))


class Ccl(msgspec.Struct, frozen=True):
    """The facts by which a CCL can, or cannot, connect the accelerators of two workers; "" for unknown.

    Attributes:
        version: version of the CCL.
        model: model of the accelerator.
        parent: PCI address of the accelerator. The parts of a GPU that is divided (MIG) have one address.
    """

    version: str = ""
    model: str = ""
    parent: str = ""


def ccl_problem(ours: Ccl, theirs: Ccl, same_node: bool) -> str:
    """Return why the CCL cannot connect two accelerators, "" if nothing is known against it.

    A CCL fails, some only after minutes, if its versions differ or if it is given two parts of one GPU.
    """
    for what, mine, other in (("versions", ours.version, theirs.version), ("models", ours.model, theirs.model)):
        if mine and other and mine != other:
            return f"their {what} differ: {mine} and {other}"
    if same_node and ours.parent and ours.parent == theirs.parent:
        return f"both are parts of the GPU at {ours.parent}"
    return ""


def _possible(path: str, pair: Pair) -> bool:
    # a CCL does not accept one device twice, and a worker cannot wait for itself
    return path != LANE or (pair.ccl and not pair.same_device and not pair.same_process)


def lines(overrides: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the table of paths as text, for ``rlinf-actors paths``.

    Each row has the kind of buffer, the facts that it needs, the path and the path's meaning. *overrides* holds the
    path that the user chose for a kind. Such a path is a row above the rows that it replaces.
    """
    found: list[tuple[str, ...]] = []
    shown: set[str] = set()
    for row in TABLE:
        if row.kind in overrides and row.kind not in shown:
            shown.add(row.kind)
            path = overrides[row.kind]
            needs = {"same_process": False, "same_device": False, "ccl": True} if path == LANE else {}
            found.append(_line(Row(row.kind, path, needs), " (RLINF_ACTORS_PATHS)"))
        found.append(_line(row, ""))
    return found


def _line(row: Row, why: str) -> tuple[str, ...]:
    words = {None: "-", True: "yes", False: "no"}
    return (row.kind, *(words[row.needs.get(column)] for column in COLUMNS), row.path, MEANING[row.path] + why)
