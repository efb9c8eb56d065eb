"""The process on a node that asks one hardware type for its pieces there: the user's code, which may hang or crash.

It reads a HardwareQuestion (JSON) from its standard input and writes a HardwareAnswer. Its interpreter is the node
group's, which may lack what we need: nothing but the standard library is imported before that is known.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import TYPE_CHECKING

from rlinf_actors.hardware.probe_child import contain, finish

if TYPE_CHECKING:
    from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion


def main(argv: list[str]) -> None:
    """Answer.

    Args:
        argv: the parent's pid; "described" on a node that only pretends to have hardware, else "real".
    """
    answer = contain(int(argv[0]))
    try:
        msgspec = importlib.import_module("msgspec")
    except ImportError as error:
        python = f"interpreter {sys.executable}"
        text = f"{python} has no msgspec ({error}): run '{sys.executable} -m pip install msgspec'"
        finish(answer, json.dumps({"kind": "failed", "text": text}).encode())
    from rlinf_actors.wire.values import HardwareQuestion

    question = msgspec.json.decode(sys.stdin.buffer.read(), type=HardwareQuestion)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path += [entry for entry in question.sys_path if entry not in sys.path and os.path.isdir(entry)]
    finish(answer, msgspec.json.encode(look(question, argv[1] == "described")))


def look(question: HardwareQuestion, described: bool) -> HardwareAnswer:
    """Load what registers types, and ask the type. Runs the user's code."""
    from rlinf_actors.errors import ConfigError
    from rlinf_actors.hardware.configured import enumerate_values, piece_of
    from rlinf_actors.hardware.extensions import is_known, load_for
    from rlinf_actors.hardware.registry import hardware_classes
    from rlinf_actors.settings import EXT_MODULE
    from rlinf_actors.wire.values import HardwareAnswer

    faults = load_for(question.type, question.extensions, os.environ.get(EXT_MODULE))
    if not is_known(question.type) or not hardware_classes(question.type):
        return HardwareAnswer(kind="unregistered", text="; ".join(faults))
    try:
        found = enumerate_values(question.type, question.node_rank, json.loads(question.configs), described=described)
    except ConfigError as error:
        return HardwareAnswer(kind="config", text=str(error.args[0]), path=error.path)
    return HardwareAnswer([piece_of(info) for info in found.infos] if found is not None else [])
