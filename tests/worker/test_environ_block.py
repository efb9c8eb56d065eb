"""The environment of a process with threads: no entry moves under a reader."""

from __future__ import annotations

import ast
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_actors import NodePlacementStrategy, Worker, environ_block
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIBC = ctypes.CDLL(None)
LIBC.getenv.restype = ctypes.c_char_p


@pytest.fixture(autouse=True)
def reserved(monkeypatch):
    for name in ("RLA_LATE", "RLA_ABSENT", "RLA_OTHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLA_SET", "before")
    environ_block.reserve(["RLA_LATE"], slots=2)
    yield
    del os.environ["RLA_LATE"]


def entries():
    """The address of the array, and those of its entries."""
    array = ctypes.POINTER(ctypes.c_void_p).in_dll(LIBC, "environ")
    found = []
    while array[len(found)]:
        found.append(array[len(found)])
    return ctypes.cast(array, ctypes.c_void_p).value, found


def test_a_late_value_replaces_one_pointer():
    array, before = entries()
    environ_block.replace({"RLA_LATE": "x" * 300})
    now, after = entries()
    assert (now, len(after)) == (array, len(before))
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 1
    assert LIBC.getenv(b"RLA_LATE") == os.environ["RLA_LATE"].encode() == b"x" * 300


def test_unreserved_variable_is_an_error():
    with pytest.raises(ValueError, match="RLA_ABSENT cannot be set any more: this process has threads"):
        environ_block.replace({"RLA_ABSENT": "1", "RLA_LATE": "2"})
    assert os.environ["RLA_LATE"] == ""


def test_overridden_variables_come_and_go_without_moving_an_entry():
    array, before = entries()
    for value in ("0", "1"):
        with environ_block.overridden({"RLA_ABSENT": value, "RLA_SET": "now", "RLA_OTHER": "2"}):
            seen = [LIBC.getenv(name) for name in (b"RLA_ABSENT", b"RLA_SET", b"RLA_OTHER")]
            assert seen == [value.encode(), b"now", b"2"]
            assert (os.environ["RLA_ABSENT"], os.environ["RLA_SET"]) == (value, "now")
            assert entries()[0] == array
            assert sum(old != new for old, new in zip(before, entries()[1], strict=True)) == 1  # RLA_SET's
    assert [LIBC.getenv(name) for name in (b"RLA_ABSENT", b"RLA_SET", b"RLA_OTHER")] == [None, b"before", None]
    assert "RLA_ABSENT" not in os.environ
    assert entries()[0] == array
    assert len(entries()[1]) == len(before)


def test_more_than_were_reserved_are_overridden_too():
    names = [f"RLA_MANY_{n}" for n in range(5)]
    with environ_block.overridden(dict.fromkeys(names, "1")):
        assert [LIBC.getenv(name.encode()) for name in names] == [b"1"] * 5
    assert [LIBC.getenv(name.encode()) for name in names] == [None] * 5


def test_entry_that_does_not_fit_is_an_error_and_changes_nothing():
    with (
        pytest.raises(ValueError, match="has 311 bytes; at most 255 fit"),
        environ_block.overridden({"RLA_OTHER": "1", "RLA_ABSENT": "y" * 300}),
    ):
        pass
    assert (LIBC.getenv(b"RLA_OTHER"), LIBC.getenv(b"RLA_ABSENT")) == (None, None)


def test_readers_on_other_threads_always_find_set_variables():
    script = """
        import ctypes, os, sys, threading
        from rlinf_actors import NodePlacementStrategy, Worker, environ_block as envblock
from rlinf_actors.testing import LocalCluster
        os.environ["RLA_THERE"] = "1"
        envblock.reserve(["MASTER_PORT"], 2)
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        ended, missed = threading.Event(), []

        def read():
            while not ended.is_set():
                missed.extend(n for n in range(1000) if getenv(b"RLA_THERE") is None)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for n in range(3000):
            envblock.replace({"MASTER_PORT": str(n)})
            with envblock.overridden({"RLA_ABSENT": str(n), "RLA_MORE": "x" * (n % 200)}):
                pass
        ended.set()
        for reader in readers:
            reader.join()
        sys.exit(len(missed))
    """
    lines = [line.removeprefix(" " * 8) for line in script.splitlines()]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd=ROOT)


@pytest.mark.live
def test_worker_has_reserved_the_late_variables():
    class Reader(Worker):
        def late(self):
            getenv = ctypes.CDLL(None).getenv
            getenv.restype = ctypes.c_char_p
            slots = [slot for slot in environ_block._slots if not slot.used]
            with environ_block.overridden({f"RLA_ABSENT_{n}": "1" for n in range(8)}):
                seen = [getenv(f"RLA_ABSENT_{n}".encode()) for n in range(8)]
            master = [getenv(name).decode() for name in (b"MASTER_ADDR", b"MASTER_PORT")]
            assert master == [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]]
            return master[0], len(slots), seen == [b"1"] * 8, slots == environ_block._slots

    with LocalCluster(1, {"accelerators": 1}) as local:
        group = Reader.create_group().launch(local.cluster(), NodePlacementStrategy([0, 0]))
        assert group.late().wait() == [(local.nodes[0].ip, 8, True, True)] * 2


WAYS = {"update", "pop", "setdefault", "clear", "popitem"}
CHANGERS = {
    "rlinf_actors/dropin/door.py",  # of a driver, a template or a worker that starts; it changes nothing twice
    "rlinf_actors/environ_block.py",
    "rlinf_actors/template/child_setup.py",  # before the worker's first thread
    "rlinf_actors/testing/leaks.py",  # of a user's test
}


def test_no_other_module_changes_the_environment_of_its_process():
    found = set()
    for path in [path for top in ("rlinf_actors", "agentd") for path in (ROOT / top).rglob("*.py")]:
        text = path.read_text()
        if not any(word in text for word in ("os.environ", "putenv", "unsetenv")):
            continue
        for node in ast.walk(ast.parse(text)):
            changed = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
            called = isinstance(node, ast.Attribute) and node.attr in WAYS
            of = ast.unparse(node.value) if changed or called else ""
            if of == "os.environ" or (isinstance(node, ast.Attribute) and node.attr in {"putenv", "unsetenv"}):
                found.add(str(path.relative_to(ROOT)))
    assert found == CHANGERS
