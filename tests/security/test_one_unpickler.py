"""User data is unpickled in one module, and only what a member of the job sent: held by reading every line of source.

import-linter sees imports that are written as such; this sees names, too, wherever and however they are used.
"""

from __future__ import annotations

import ast
import functools
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
"""Modules that make objects, or code, of bytes; and what has them as an attribute."""
READERS = frozenset(
    {"Unpickler", "find_class", "recv_pyobj", "send_pyobj", "recv_serialized", "all_gather_object", "gather_object",
     "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list", "weights_only",
     "allow_pickle", "ProcessPoolExecutor", "unsafe_load", "full_load", "UnsafeLoader", "FullLoader"}
)  # fmt: skip
"""Functions of others that unpickle what they are given, or arguments that have them do so."""
LOADERS = frozenset({"torch", "numpy", "np", "joblib", "yaml"})
"""Modules whose `load` may unpickle."""
RUNNERS = frozenset({"exec", "eval", "compile", "__import__"})
REDUCERS = frozenset({"__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"})

WATCHED = UNPICKLERS | READERS | RUNNERS | REDUCERS | {f"{module}.load" for module in LOADERS}

ALLOWED = {
    # who, what: why
    (PAYLOAD, "pickle"), (PAYLOAD, "cloudpickle"),
    (PAYLOAD, "__reduce_ex__"),  # torch's own, of tensors of rare kinds
    (PAYLOAD, "__reduce__"),  # of a tensor's bytes; whether a class has its own
    (PAYLOAD, "Unpickler"), (PAYLOAD, "find_class"),
    ("rlinf_actors/config/config_values.py", "yaml.load"),  # by a SafeLoader
    # its name: for people, and for what is imported before a fork
    ("rlinf_actors/cli/doctor_checks.py", "cloudpickle"), ("rlinf_actors/cli/doctor.py", "cloudpickle"),
    ("rlinf_actors/template/bootstrap.py", "cloudpickle"), ("rlinf_actors/template/template.py", "cloudpickle"),
    # values of ours that users may put into their data
    ("rlinf_actors/model/address.py", "__reduce__"), ("rlinf_actors/model/hardware.py", "__reduce_ex__"),
    ("rlinf_actors/channel/channel.py", "__reduce__"), ("rlinf_actors/wire/failure.py", "__reduce__"),
    ("rlinf_actors/group/group.py", "__reduce__"),
    # what is no value raises there
    ("rlinf_actors/runtime/future.py", "__reduce__"), ("rlinf_actors/group/result.py", "__reduce__"),
    ("rlinf_actors/group/stream.py", "__reduce__"), ("rlinf_actors/group/mapping.py", "__reduce__"),
}  # fmt: skip


def words(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a piece of source names that this test has an opinion of, with its line."""
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


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}


def found_in(source: str) -> set[str]:
    return {name for name, _ in words(ast.parse(source))}


def test_nothing_else_can_make_objects_of_bytes():
    used, wrong = set(), []
    for where, tree in trees().items():
        for name, line in words(tree):
            used.add((where, name))
            if (where, name) not in ALLOWED:
                wrong.append(f"{where}:{line}: {name}")
    assert not wrong
    assert used == ALLOWED, "what is allowed and not there any more is to be forbidden again"


def test_who_may_vouch():
    """`AuthenticatedParts` parts are made where a member is known, and nowhere else."""
    makers = set()
    for where, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if name == "AuthenticatedParts" and node.args:
                    makers.add(where)
    assert makers == {
        "rlinf_actors/wire/payload.py", "rlinf_actors/wire/failure.py", "rlinf_actors/runtime/peer.py",
        "rlinf_actors/worker/worker_server.py", "rlinf_actors/worker/children.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n    from pickle import loads", "pickle"),
        ("import multiprocessing.connection", "multiprocessing"),
        ("importlib.import_module('cloudpickle')", "cloudpickle"),
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
def test_it_would_be_seen(source, name):
    assert name in found_in(source)


def test_what_is_no_such_thing_is_not_taken_for_it():
    assert not found_in("re.compile(text); json.load(file); config.load(arguments); payload.decode(parts)")
