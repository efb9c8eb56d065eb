"""Tools that do anything: how they are run, and what is left of them."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pace
import pytest
from vendor_kit import Tree

from rlinf_actors.hardware.vendors.machine import Machine

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("nothing_left")]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_output_of_a_tool_is_returned(tree: Tree) -> None:
    tree.tool("smi", "out(f'{a} {os.environ[\"LC_ALL\"]}'); sys.stderr.write('a warning')")
    done = Machine(tree.environ).run("smi", "info", "-m")
    assert (done.command, done.output, done.fault) == ("smi info -m", "['info', '-m'] C", "")


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "smi -q crashed (SIGSEGV)"),
        ("os.kill(os.getpid(), 64)", "smi -q crashed (SIGRTMAX)"),
        ("sys.exit('no driver\\n\\n')", "smi -q ended with exit code 1; its last words: no driver"),
        ("out('dcmi failed'); sys.exit(3)", "smi -q ended with exit code 3; its last words: dcmi failed"),
    ],
)
def test_a_tool_that_fails(tree: Tree, body: str, fault: str) -> None:
    tree.tool("smi", body)
    assert Machine(tree.environ).run("smi", "-q").fault == fault


@pytest.mark.parametrize("where", [1, 2])
def test_a_tool_that_prints_for_ever_is_killed(tree: Tree, where: int) -> None:
    tree.tool("smi", f"while True: os.write({where}, b'x' * 65536)")
    done = Machine(tree.environ).run("smi")
    assert done.fault == "smi printed more than 4 MiB and was killed"
    assert len(done.output) in (0, 4 << 20)


def test_a_tool_that_prints_more_than_a_pipe_holds(tree: Tree) -> None:
    tree.tool("smi", "out('x' * 300_000); sys.stderr.write('y' * 300_000)")
    done = Machine(tree.environ).run("smi")
    assert (len(done.output), done.fault) == (300_000, "")


def test_a_process_left_by_a_tool_delays_nothing(tree: Tree) -> None:
    tree.tool("smi", "out(f'{a}')\nsys.stdout.flush()\nif os.fork() == 0: signal.pause()")
    done = Machine(tree.environ).run("smi")
    assert (done.output, done.fault) == ("[]", "")


def test_a_missing_tool_is_a_fault(tree: Tree) -> None:
    done = Machine(tree.environ).run("nowhere-smi", "-q")
    assert done.fault == "nowhere-smi is not installed: it is not on PATH (/usr/bin:/bin)"


def test_a_tool_that_is_no_program(tree: Tree) -> None:
    (tree.bin / "smi").write_bytes(b"\x7fELF, or what is left of it")
    (tree.bin / "smi").chmod(0o755)
    assert Machine(tree.environ).run("smi").fault.startswith("smi cannot be started: ")


def test_a_hung_tool_is_killed_with_its_children_and_the_others_answer(tree: Tree) -> None:
    pid = tree.root / "pid"
    os.mkfifo(pid)
    tree.tool(
        "smi",
        f"if a == ['well']: out('all is well'); sys.exit()\nchild = os.fork()\nif child:\n    open({str(pid)!r}, 'w')"
        ".write(str(child))\nsignal.pause()",
    )
    reader = os.open(pid, os.O_RDONLY | os.O_NONBLOCK)  # the tool's open() of the other end waits for nobody
    well, hangs = Machine(tree.environ, limit_s=10).run_all([("smi", "well"), ("smi", "hang")])
    child = int(os.read(reader, 20))
    os.close(reader)
    assert (well.output, well.fault) == ("all is well", "")
    assert hangs.fault.startswith("smi hang gave no answer within 10 s; it was killed. Give it longer in agentd.toml")
    _assert_ends(child)


def test_files_below_the_root(tree: Tree) -> None:
    tree.write("/sys/number", "0x10")
    tree.write("/sys/bytes")
    (tree.root / "sys" / "bytes").write_bytes(b"\xff\xfe")
    machine = Machine(tree.environ)
    assert machine.number("/sys/number", -1) == 16
    assert machine.number("/sys/bytes", -1) == machine.number("/sys/nowhere", -1) == -1
    assert machine.glob("/sys/*") == ["/sys/bytes", "/sys/number"]
    assert machine.numa_node("") == machine.numa_node("0000:00:00.0") == machine.hwmon_celsius("x") == -1


def _assert_ends(pid: int) -> None:
    """Wait for the end of a process that was killed."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], pace.PATIENCE_S)[0]
    finally:
        os.close(pidfd)
