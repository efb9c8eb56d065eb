"""The source names every dependence on byte order or word size: these tests parse all source files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rlinf_actors.wire import frames

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for top in ("rlinf_actors", "agentd") for path in (ROOT / top).rglob("*.py"))

NATIVE = {
    # structures of this machine's kernel and libraries, and an errno from a child: they never leave the machine
    "agentd/keeper.py", "rlinf_actors/cli/estop_button.py", "rlinf_actors/cli/run/signals.py",
    "rlinf_actors/hardware/interfaces.py",
    "rlinf_actors/net/connection_guard.py", "rlinf_actors/net/connection_watch.py",
    "rlinf_actors/net/curve.py", "rlinf_actors/net/unix_sockets.py",
    "rlinf_actors/procfs.py", "rlinf_actors/worker/children.py",
}  # fmt: skip
MEMORY = {
    # a CPU's memory through ctypes: of this process, or shared by processes of one machine
    "agentd/keeper.py", "agentd/users.py", "rlinf_actors/hardware/egl.py",
    "rlinf_actors/cli/estop_button.py", "rlinf_actors/cli/run/signals.py", "rlinf_actors/diagnosis/machine.py",
    "rlinf_actors/environ_block.py", "rlinf_actors/net/shared_memory.py",
    "rlinf_actors/net/descriptors.py", "rlinf_actors/net/held_signals.py", "rlinf_actors/net/memory_mapping.py",
    "rlinf_actors/procfs.py", "rlinf_actors/runtime/lost_errors.py", "rlinf_actors/messaging/contents.py",
    "rlinf_actors/messaging/receive_into.py",
    "rlinf_actors/messaging/cuda_ipc.py", "rlinf_actors/wire/arrays.py",
    "rlinf_actors/template/child_setup.py",
    "rlinf_actors/worker/debugger_command.py", "rlinf_actors/worker/main.py", "rlinf_actors/worker/standstill.py",
    "rlinf_actors/worker/leasepage.py", "rlinf_actors/worker/outside_stacks.py",
}  # fmt: skip
CODERS = {"pack", "unpack", "pack_into", "unpack_from", "iter_unpack", "Struct", "calcsize"}


def calls(path, *words):
    """The calls in a file, if it has one of *words*."""
    text = path.read_text()
    if not any(word in text for word in words):
        return []
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def of_struct(call):
    function = call.func
    return isinstance(function, ast.Attribute) and function.attr in CODERS and ast.unparse(function.value) == "struct"


def is_text(argument):
    return isinstance(argument, (ast.Constant, ast.JoinedStr))


def test_struct_formats_name_their_byte_order_except_for_kernel_structs():
    native = set()
    for path in SOURCES:
        for call in filter(of_struct, calls(path, "struct")):
            said = ast.unparse(call.args[0]).removeprefix("f")[1:2] if is_text(call.args[0]) else ""
            assert said, f"{path}:{call.lineno}: say the format there"
            if said not in "<>!":
                native.add(str(path.relative_to(ROOT)))
    assert native - NATIVE == set(), "name the byte order (<), or list them if the structure never leaves the machine"
    assert NATIVE - native == set()


def test_to_bytes_and_from_bytes_name_their_byte_order():
    for path in SOURCES:
        for call in calls(path, "to_bytes", "from_bytes"):
            if isinstance(call.func, ast.Attribute) and call.func.attr in {"to_bytes", "from_bytes"}:
                assert len(call.args) > 1 or any(word.arg == "byteorder" for word in call.keywords), (path, call.lineno)


def test_only_listed_modules_use_ctypes():
    users = {str(path.relative_to(ROOT)) for path in SOURCES if "import ctypes" in path.read_text()}
    assert users - MEMORY == set(), "if the memory they access never leaves the machine, list these modules in MEMORY"
    assert MEMORY - users == set()


def test_join_without_a_byte_order_is_little_endian():
    assert frames.Join(6, "1", "3.11", "d", "t", "w").byte_order == "little"
