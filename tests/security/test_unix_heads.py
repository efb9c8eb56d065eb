"""A program of another user that poses as the head at a unix socket gets nothing: no hello, no token, no visitor."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from two_users import OTHER_USER, ROOT, why_not
from zmq.utils.monitor import recv_monitor_message

from rlinf_actors import Cluster
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.connection_watch import end_stranger
from rlinf_actors.net.unix_sockets import check_place

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
MALLORY = 64001
ADA = 64002
BIN = Path(sys.executable).parent

FAKE = textwrap.dedent("""
    import os, sys, zmq
    os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
    fake = zmq.Context().socket(zmq.ROUTER)
    fake.bind("ipc://" + sys.argv[2])
    os.chmod(sys.argv[2], 0o777)
    print("up", flush=True)
    print(len(fake.recv_multipart()), flush=True)
""")


@pytest.fixture
def fake() -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A directory of mallory's with a socket that all may use, and what listens there: it prints if a message comes."""
    with tempfile.TemporaryDirectory(prefix="rlinf-fake-") as made:  # other users cannot enter pytest's directories
        directory = Path(made)
        directory.chmod(0o755)
        os.chown(directory, MALLORY, MALLORY)
        yield from listening(directory)


def listening(directory: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", FAKE, str(MALLORY), str(directory / "head")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield directory, process
        process.kill()
        assert process.stdout.read() == "", "a message came to the fake head"


def test_a_driver_does_not_join_another_users_head(fake: tuple[Path, object]) -> None:
    with pytest.raises(ConfigError, match=rf"belongs to user {MALLORY}.*could pose as the head"):
        Cluster(head=f"ipc://{fake[0]}/head")


def test_an_agentd_does_not_connect_to_another_users_head(fake: tuple[Path, object], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentd", "--connect", f"ipc://{fake[0]}/head", "--run-dir", str(tmp_path / "own")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert f"belongs to user {MALLORY}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("form", ["ipc://{}/head", "{}"])
def test_a_command_of_a_third_user_asks_no_head_of_another_user(fake: tuple[Path, object], form: str) -> None:
    with tempfile.TemporaryDirectory(prefix="rlinf-ada-") as home:
        command = [sys.executable, OTHER_USER, str(ADA), home, BIN / "rlinf-actors"]
        done = subprocess.run(
            [*command, "status", "--head", form.format(fake[0])],
            capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode != 0
    assert f"user {MALLORY}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_place_of_a_socket_is_this_users_or_roots_alone(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    check_place(str(own / "head"))  # not there yet: only we can make it
    own.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to"):
        check_place(str(own / "head"))
    own.chmod(0o777 | stat.S_ISVTX)
    with pytest.raises(ConfigError, match="other users may write to"):
        check_place(str(own / "head"))
    (own / "head").touch()
    check_place(str(own / "head"))  # ours, and others cannot replace it there
    os.chown(own / "head", MALLORY, MALLORY)
    with pytest.raises(ConfigError, match=f"it belongs to user {MALLORY}"):
        check_place(str(own / "head"))
    with pytest.raises(ConfigError, match="other users may write to /tmp"):
        check_place(f"/tmp/rlinf-nothing-{os.getpid()}/head")


@pytest.fixture
def ada() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python script as ada, with a home of hers and without XDG_RUNTIME_DIR."""
    with tempfile.TemporaryDirectory(prefix="rlinf-ada-") as home, contextlib.ExitStack() as stack:

        def start(script: str, *arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(OTHER_USER), str(ADA), home, script, *arguments]
            env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.terminate)
            return process

        yield start


def test_the_default_run_directory_is_refused_if_another_user_made_it(
    ada: Callable[..., subprocess.Popen[str]],
) -> None:
    """Its name in /tmp can be guessed, and whoever makes it first has the sockets there."""
    usual = Path(f"/tmp/rlinf-actors-{ADA}")
    usual.mkdir(mode=0o777)
    try:
        os.chown(usual, MALLORY, MALLORY)
        usual.chmod(0o777)
        agentd = ada(str(BIN / "agentd"), "--head", "--listen", "127.0.0.1:0")
        _, said = agentd.communicate(timeout=60)
        assert agentd.returncode == 78, said
        assert f"run_dir {usual}: belongs to user {MALLORY}, not to us ({ADA})" in said
        assert "Traceback" not in said
        assert list(usual.iterdir()) == []
    finally:
        shutil.rmtree(usual)


SPY = """
import os, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for name in ("mem", "environ", "maps", "fd/0"):
    try:
        open(f"/proc/{sys.argv[2]}/{name}", "rb").close()
        print("open", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


def test_memory_of_a_head_is_closed_to_its_own_user(ada: Callable[..., subprocess.Popen[str]]) -> None:
    head = ada(str(BIN / "rlinf-actors"), "head", "--listen", "127.0.0.1:0")
    assert head.stdout is not None
    assert head.stdout.readline().startswith("127.0.0.1:"), head.communicate()
    found = subprocess.check_output([sys.executable, "-c", SPY, str(ADA), str(head.pid)], text=True)
    assert found.split() == ["PermissionError"] * 4
    asleep = ada("-c", "import signal; print(flush=True); signal.pause()")
    assert asleep.stdout is not None
    asleep.stdout.readline()
    found = subprocess.check_output([sys.executable, "-c", SPY, str(ADA), str(asleep.pid)], text=True)
    assert "open" in found, "the attempt itself works"


def test_a_connection_to_another_users_process_is_ended(fake: tuple[Path, object]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.linger = 0
        events = link.get_monitor_socket(zmq.EVENT_CONNECTED)
        link.connect(f"ipc://{fake[0]}/head")
        assert events.poll(10_000)
        event = recv_monitor_message(events)
        assert end_stranger(event["value"]) == f"a process of user {MALLORY} listens there"
        link.disable_monitor()
        events.close()
