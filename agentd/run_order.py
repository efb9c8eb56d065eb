"""The start of an agentd by `rlinf-actors run`: read from stdin what to be.

The run starts this agentd here, by ssh or by srun, and keeps the pipe to stdin open until it ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.model.run_order import AgentOrder
from rlinf_actors.settings import SLURM_NODE, Settings

SOURCE = "--of-run"
_MAX_PARENT = 60
"""Longest parent of a run directory, in bytes (RunDir.open limits the whole path)."""


def take(stdin: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the order of a run from the descriptor *stdin*. Return the options of agentd that it stands for. Blocks.

    Raises:
        ConfigError: stdin has no order, or none for this node.
    """
    try:
        order = msgspec.json.decode(_line(stdin), type=AgentOrder)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"is for `rlinf-actors run`, and stdin has none of its orders: {error}", path=SOURCE
        ) from None
    name = next(iter(order.nodes)) if len(order.nodes) == 1 else environ.get(SLURM_NODE, "")
    if name not in order.nodes:
        names = ", ".join(order.nodes)
        raise ConfigError(f"{SLURM_NODE} is {name!r}, which is no node of this run: {names}", path=SOURCE)
    node = order.nodes[name]
    key = os.memfd_create("rlinf-key")
    os.write(key, node.key.encode())
    run_dir = node.run_dir or _new_run_dir(Settings.load(environ))
    return {
        "connect": order.connect,
        "name": name,
        "rank": node.rank,
        "key_fd": key,
        "run_dir": run_dir,
        "log_dir": node.log_dir or f"{run_dir}/logs",
        "keep": False,
        "of_run": True,
        "ready_fd": os.dup(1),
    }


def _line(stdin: int) -> bytes:
    data = b""
    while not data.endswith(b"\n") and (chunk := os.read(stdin, 1 << 16)):
        data += chunk
    return data


def _new_run_dir(settings: Settings) -> str:
    parent = settings.run_dir or tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rlinf-node-", dir=parent if len(os.fsencode(parent)) <= _MAX_PARENT else "/tmp")
