"""The names at top level, and what importing them costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import loop_rows
import pytest

import rlinf_actors
from rlinf_actors import errors

PROMISED = (
    "Cluster", "ClusterConfig", "NodeGroupConfig", "NodeInfo", "NodeGroupInfo",
    "ComponentPlacement", "Placement", "PlacementStrategy", "PackedPlacementStrategy", "StridedPlacementStrategy",
    "FlexiblePlacementStrategy", "NodePlacementStrategy",
    "Worker", "WorkerAddress", "WorkerInfo", "WorkerGroup", "WorkerGroupFuncResult",
    "Accelerator", "AcceleratorType", "AcceleratorUtil", "Hardware", "HardwareConfig", "HardwareInfo",
    "HardwareResource", "NodeHardwareConfig", "Channel", "ChannelWorker", "WeightedItem",
    "AsyncWork", "CollectiveGroupOptions",
    "FrankaConfig", "FrankaHWInfo", "DualFrankaConfig", "DualFrankaHWInfo", "GimArmConfig", "GimArmHWInfo",
    "DOSW1Config", "DOSW1HWInfo", "Turtle2Config", "Turtle2HWInfo",
)  # fmt: skip


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", PROMISED)
def test_a_promised_name_is_there(name):
    assert name in rlinf_actors.__all__
    assert getattr(rlinf_actors, name).__name__ == name


def test_every_name_resolves_and_nothing_else_does():
    for name in rlinf_actors.__all__:
        assert getattr(rlinf_actors, name) is not None
        assert name in dir(rlinf_actors)
    with pytest.raises(AttributeError, match="has no attribute 'Wroker'"):
        _ = rlinf_actors.Wroker


def test_every_error_is_exported():
    found = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert found <= set(rlinf_actors.__all__)


def test_every_public_method_has_a_row_of_what_it_does_in_an_event_loop():
    """tests/live/test_event_loops.py runs the rows with the head stopped. A new method: see tests/loop_rows.py."""
    assert loop_rows.missing() == set()


def test_the_table_and_what_type_checkers_see_agree():
    tree = ast.parse(Path(rlinf_actors.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    seen = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        assert statement.module is not None
        seen.update({alias.asname: statement.module for alias in statement.names})
    table = {name: f"rlinf_actors.{module}" for name, module in rlinf_actors._HOME.items()}
    assert seen == table


def loaded(statement: str, *modules: str) -> str:
    return python(f"{statement}; import sys; print([name for name in {modules} if name in sys.modules])")


def test_the_import_is_light():
    heavy = ("torch", "numpy", "zmq", "msgspec", "pynvml", "yaml", "asyncio", "click", "rich", "cloudpickle", "uvloop")
    assert loaded("import rlinf_actors", *heavy) == "[]"
    assert python("import rlinf_actors, threading; print(threading.active_count())") == "1"


def test_import_sets_up_no_logging():
    assert python("import rlinf_actors, logging; print(logging.root.handlers, logging.root.level)") == "[] 30"


def test_a_worker_class_needs_no_torch():
    assert loaded("from rlinf_actors import Worker, Cluster", "torch", "numpy", "zmq") == "[]"


def test_the_names_of_a_script_make_no_decoder_and_read_no_configuration():
    """Decoders of all messages take 15 ms, the classes of the configuration 12: a Cluster makes them while it waits."""
    names = "from rlinf_actors import Cluster, Worker, PackedPlacementStrategy"
    sections = ("cluster_config", "component_rules", "net_emulation_config", "profiling_config", "small_sections")
    later = (*(f"rlinf_actors.config.{name}" for name in sections), "rlinf_actors.placement.described", "yaml")
    assert loaded(names, *later) == "[]"
    code = f"""
import msgspec
real, kinds = msgspec.msgpack.Decoder, []
msgspec.msgpack.Decoder = lambda *kind: kinds.extend(kind) or real(*kind)
{names}
from rlinf_actors.wire import control_codec, frames, protocol
messages = [control_codec.Envelope, frames.AnyFrame]
early = [kind for kind in messages if kind in kinds]
protocol.make_decoders()
print(early, [kind in kinds for kind in messages])
"""
    assert python(code) == "[] [True, True]"


def test_the_daemon_loads_neither_torch_nor_pickles():
    assert loaded("import agentd.command_line", "torch", "numpy", "cloudpickle", "click", "rich") == "[]"
