"""User data is unpickled in one module, and only if a member of the job sent it: these tests parse all source files.

import-linter checks import statements; these tests check all names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for top in ("rlinf_actors", "agentd") for path in (ROOT / top).rglob("*.py"))

PAYLOAD = "rlinf_actors/wire/payload.py"
UNPICKLERS = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "multiprocessing",
     "pickletools", "jsonpickle", "ForkingPickler"}
)  # fmt: skip
"""Modules that make objects or code from bytes, and attributes with their names."""
READERS = frozenset(
    {"Unpickler", "find_class", "recv_pyobj", "send_pyobj", "recv_serialized", "all_gather_object", "gather_object",
     "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list", "weights_only",
     "allow_pickle", "ProcessPoolExecutor", "unsafe_load", "full_load", "UnsafeLoader", "FullLoader"}
)  # fmt: skip
"""Functions of other libraries that unpickle, and arguments that make them unpickle."""
LOADERS = frozenset({"torch", "numpy", "np", "joblib", "yaml"})
"""Modules whose `load` may unpickle."""
RUNNERS = frozenset({"exec", "eval", "compile", "__import__"})
REDUCERS = frozenset({"__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"})

WATCHED = UNPICKLERS | READERS | RUNNERS | REDUCERS | {f"{module}.load" for module in LOADERS}

ALLOWED = {
    # module, name: why
    (PAYLOAD, "pickle"), (PAYLOAD, "cloudpickle"),
    (PAYLOAD, "__reduce_ex__"),  # torch's own, of tensors of rare kinds
    (PAYLOAD, "__reduce__"),  # of a tensor's bytes; also tests if a class defines it
    (PAYLOAD, "Unpickler"), (PAYLOAD, "find_class"),
    ("rlinf_actors/config/config_values.py", "yaml.load"),  # by a SafeLoader
    # only the name, in messages
    ("rlinf_actors/wire/check_values.py", "cloudpickle"),
    ("rlinf_actors/cli/doctor/machine_checks.py", "cloudpickle"), ("rlinf_actors/cli/doctor/machine.py", "cloudpickle"),
    ("rlinf_actors/template/bootstrap.py", "cloudpickle"),
    # runs the user's program, a file of this machine, as `python` does
    ("rlinf_actors/dropin/__main__.py", "compile"), ("rlinf_actors/dropin/__main__.py", "exec"),
    # our classes that user data may contain
    ("rlinf_actors/model/address.py", "__reduce__"), ("rlinf_actors/model/hardware.py", "__reduce_ex__"),
    ("rlinf_actors/channel/channel.py", "__reduce__"), ("rlinf_actors/wire/failure.py", "__reduce__"),
    ("rlinf_actors/group/group.py", "__reduce__"), ("rlinf_actors/worker/leasepage.py", "__reduce__"),
    # these objects are no values: they raise
    ("rlinf_actors/runtime/future.py", "__reduce__"), ("rlinf_actors/group/result.py", "__reduce__"),
    ("rlinf_actors/group/stream.py", "__reduce__"), ("rlinf_actors/group/mapping.py", "__reduce__"),
}  # fmt: skip


def banned_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The watched names in *tree*, with their lines."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr not in RUNNERS else []  # re.compile() and others
            value = node.value
            if isinstance(value, ast.Name) and (value.id in LOADERS and node.attr == "load"):
                names = [f"{value.id}.load"]
            elif isinstance(value, ast.Name) and value.id == "builtins":
                names = [node.attr]
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [node.name]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]  # import_module("pickle"), getattr(module, "Unpickler"), {"__reduce__": ...}
        else:
            continue
        for name in names:
            if name in WATCHED:
                yield name, line


def mentions(text: str, names: frozenset[str]) -> bool:
    """True if one of *names* is in the source *text*, as a word or in a string of several pieces."""
    text = re.sub(r"""["']\s*["']""", "", text.replace("re.compile(", ""))
    return not names.isdisjoint([*re.findall(r"\w+", text), *re.findall(r"\w+\.load\b", text)])


def trees(names: frozenset[str]) -> Iterator[tuple[str, ast.Module]]:
    """The tree of each source file that mentions one of *names*: to parse and walk all takes ten seconds."""
    for path in SOURCES:
        text = path.read_text()
        if mentions(text, names):
            yield str(path.relative_to(ROOT)), ast.parse(text)


def banned_names_in(source: str) -> set[str]:
    return {name for name, _ in banned_names(ast.parse(source))}


def test_only_listed_modules_can_deserialize_objects():
    used, wrong = set(), []
    for where, tree in trees(WATCHED):
        for name, line in banned_names(tree):
            used.add((where, name))
            if (where, name) not in ALLOWED:
                wrong.append(f"{where}:{line}: {name}")
    assert not wrong
    assert used == ALLOWED, "remove unused entries from ALLOWED"


def test_only_listed_modules_make_authenticated_parts():
    """AuthenticatedParts are made only where the sending member is known."""
    makers = set()
    for where, tree in trees(frozenset({"AuthenticatedParts"})):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name == "AuthenticatedParts" and node.args:
                    makers.add(where)
    assert makers == {
        "rlinf_actors/wire/payload.py", "rlinf_actors/wire/failure.py", "rlinf_actors/runtime/peer.py",
        "rlinf_actors/worker/worker_server.py", "rlinf_actors/worker/children.py",
        "rlinf_actors/worker/shared_calls.py",  # joins the parts of two members' messages
        "rlinf_actors/worker/stopper.py",  # of its worker, by a pair of sockets that both inherited
        "rlinf_actors/messaging/receive_into.py",  # a part of a member's message was received into another place
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    from pickle import loads", "pickle"),
        ("import multiprocessing.connection", "multiprocessing"),
        ("importlib.import_module('cloudpickle')", "cloudpickle"),
        ("importlib.import_module('cloud' \"pickle\")", "cloudpickle"),
        ("copyreg.pickle(int, f)", "pickle"),
        ("torch.load(file)", "torch.load"),
        ("numpy.load(file, allow_pickle=True)", "allow_pickle"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("getattr(zmq.sugar.socket, 'pickle').loads(data)", "pickle"),
        ("zmq.sugar.socket.pickle.loads(data)", "pickle"),
        ("class A:\n    def __setstate__(self, state): ...", "__setstate__"),
        ("type('A', (), {'__reduce__': f})", "__reduce__"),
        ("f = eval", "eval"),
        ("builtins.exec(code)", "exec"),
        ("yaml.load(text, Loader=yaml.UnsafeLoader)", "UnsafeLoader"),
        ("torch.distributed.broadcast_object_list(objects)", "broadcast_object_list"),
    ],
)
def test_check_finds_each_way_to_deserialize(source, name):
    assert name in banned_names_in(source)
    assert mentions(source, WATCHED)


def test_check_ignores_harmless_names():
    assert not banned_names_in("re.compile(text); json.load(file); config.load(arguments); payload.decode(parts)")
