"""`rlinf-actors run`: a cluster of one program on this machine, which ends with the program, however that ends."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pace
import pytest
from terminal import terminal

from rlinf_actors import procfs
from rlinf_actors.cli.run.plans import advice, common_address
from rlinf_actors.cluster.local_daemon import processes_with
from rlinf_actors.errors import ConfigError
from rlinf_actors.net import discovery
from rlinf_actors.net.head_records import find_records
from rlinf_actors.settings import TEST_MARK, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "run-a-program.md"
TOOL = [sys.executable, "-m", "rlinf_actors.cli.main"]
RUN = [*TOOL, "run"]
UNKNOWN = "no.such.host.invalid"
WAITS = "import signal; print('up', flush=True); signal.pause()"

live = [pytest.mark.live, pytest.mark.usefixtures("rlinf_leak_check", "own_places")]


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heads").mkdir()
    monkeypatch.setenv("RLINF_ACTORS_HEADS", str(tmp_path / "heads"))
    monkeypatch.setenv("RLINF_ACTORS_KEPT_LOGS", str(tmp_path / "kept"))


def train(folder: Path, then: str = "pass") -> Path:
    """Write the program of the page into *folder*. It goes on with the statement *then*."""
    (text,) = re.findall(r"^```python\n(# train.py\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    path = folder / "train.py"
    path.write_text(text.replace("print(nodes)", f"print(nodes, flush=True); {then}"))
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S
    )


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run, and wait for the first line of its program."""
    with subprocess.Popen([*RUN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline(), process.stderr.read()
            yield process
        finally:
            process.kill()


def commands(words: str) -> list[str]:
    """The command lines of the page that begin with *words*."""
    return re.findall(rf"^    ({re.escape(words)}.*)$", PAGE.read_text(), re.M)


class TestHere:
    pytestmark = live

    def test_the_program_of_the_page_finds_all_nodes_of_its_run(self, tmp_path):
        train(tmp_path)
        (command,) = commands("rlinf-actors run --nodes")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=pace.PATIENCE_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "[0, 1]\n")
        assert all(line.startswith("waiting for nodes: ") for line in done.stderr.splitlines()), done.stderr
        assert not (tmp_path / "kept").exists()

    def test_exit_code_and_logs_of_a_program_that_fails_and_leaves_processes(self, tmp_path):
        done = run("--", "sh", "-c", "sleep 1000 >&- 2>&- & setsid sleep 1000 >&- 2>&- & kill -KILL $$")
        assert done.returncode == 128 + signal.SIGKILL
        assert "ended 2 processes that the program had left" in done.stderr
        (kept,) = (tmp_path / "kept").iterdir()
        why = "the program was killed by signal 9"
        assert f"the logs of this run are kept in {kept} because {why}\n" in done.stderr
        assert (kept / "reason.txt").read_text() == f"{why}\n"
        assert {"head.log", "node0.log"} <= {path.name for path in (kept / "logs").iterdir()}

    def test_signals_reach_the_program_and_other_commands_the_cluster(self):
        count = (
            "import os, signal\nfor name in ('USR1', 'INT'):\n"  # a handler's print may interrupt another: not os.write
            "    signal.signal(getattr(signal, 'SIG' + name), lambda number, _: os.write(1, b'%d\\n' % number))\n"
            "print('up', flush=True)\nwhile True:\n    signal.pause()"
        )
        with running("--", sys.executable, "-c", count) as process:
            found = subprocess.run(
                [*TOOL, "nodes", "--json"], capture_output=True, text=True, check=True, timeout=pace.PATIENCE_S
            )
            assert [(node["hostname"], node["rank"]) for node in json.loads(found.stdout)] == [("node0", 0)]
            assert f": run: {sys.executable} -c 'import os" in found.stderr
            (head,) = (record for record in find_records(Settings.load()).records if record.kind == "head")
            assert discovery.local_way(f"tcp://{head.address}", Settings.load()).startswith("ipc://"), "needs no key"
            assert process.stdout is not None
            for number in (signal.SIGUSR1, signal.SIGINT):
                process.send_signal(number)
                assert process.stdout.readline() == f"{int(number)}\n"
            process.terminate()
            assert process.wait(pace.PATIENCE_S) == 128 + signal.SIGTERM

    def test_ctrl_c_reaches_the_program_once(self):
        count = (
            "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\nprint('up', flush=True)\n"
            "signal.sigwait([signal.SIGINT])\n"
            "raise SystemExit(41 + (signal.sigtimedwait([signal.SIGINT], 0.5) is not None))"
        )
        ours, theirs = pty.openpty()
        words = ["setsid", "--ctty", *RUN, "--", sys.executable, "-c", count]
        with (
            subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as process,
            open(ours, "rb", 0) as terminal,
        ):
            os.close(theirs)
            try:
                assert terminal.readline().endswith(b"up\r\n")
                os.write(ours, b"\x03")
                assert process.wait(pace.PATIENCE_S) == 41
            finally:
                process.kill()

    def test_the_run_ends_with_its_terminal(self, tmp_path):
        """The run leads its session, as under `ssh -t`: only the leader is told that the terminal is gone."""
        ours, theirs = pty.openpty()
        words = ["setsid", "--ctty", *RUN, "--", sys.executable, "-c", WAITS]
        with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            try:
                with open(ours, "rb", 0) as terminal:
                    while b"up" not in terminal.readline():
                        pass
                assert process.wait(pace.PATIENCE_S) == 128 + signal.SIGHUP
            finally:
                process.kill()
        assert list((tmp_path / "kept").iterdir())

    def test_nothing_is_left_when_the_run_is_killed(self, tmp_path):
        """The program has a worker on each node, and a child."""
        then = "import subprocess; subprocess.Popen(['sleep', '1000']); await asyncio.sleep(1000)"
        with running("--nodes", "2", "--", sys.executable, str(train(tmp_path, then))) as process:
            process.kill()
            process.wait()
            left = pace.again_like(lambda: processes_with(TEST_MARK, os.environ[TEST_MARK]), [])
        assert left == []

    def test_a_failed_start_ends_the_run_with_its_reason(self, monkeypatch):
        monkeypatch.setenv("RLINF_ACTORS_FAULTS", "not json")
        done = run("--", "true")
        assert done.returncode == 1
        assert "head has ended with exit code 78; the last lines of its log:" in done.stderr
        assert "RLINF_ACTORS_FAULTS: is no list of faults" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_run_whose_nodes_do_not_come_up_says_which_and_ends(self, tmp_path):
        silent = tmp_path / "ssh"
        silent.write_text("#!/bin/sh\n[ $1 = -G ] && exec echo hostname localhost\necho slow >&2\nexec sleep 1000\n")
        silent.chmod(0o755)
        with terminal("run", "--timeout", "4", "--ssh", str(silent), "--hosts", "a,me@b", "--", "true") as shown:
            assert shown.end() == 69
        assert "\r\x1b[2Kwaiting for nodes: 0 of 2, " in shown.shown
        assert "\r\x1b[2Kthe logs of this run are kept in " in shown.shown
        assert "0 of 2 nodes are up after 4 s; missing a by ssh to a, which said last: slow; b by " in shown.shown

    def test_a_host_without_the_package_is_named_with_what_to_do(self, tmp_path):
        """ssh is a shell here. The run fails before its head has read its order, and keeps its logs."""
        venv.create(tmp_path / "bare")
        ssh = tmp_path / "ssh"
        ssh.write_text('#!/bin/sh\n[ $1 = -G ] && exec echo hostname localhost\nshift $(($# - 1))\nexec sh -c "$1"\n')
        ssh.chmod(0o755)
        done = run("--ssh", str(ssh), "--python", str(tmp_path / "bare/bin/python"), "--hosts", "gpu1", "--", "true")
        assert done.returncode == 1
        assert (
            "error: ssh to gpu1 has ended with exit code 1; install rlinf-actors for that Python, or name another by "
            "--python; the last lines of its log:\n    ModuleNotFoundError: No module named "
        ) in done.stderr
        assert "Traceback" not in done.stderr
        (kept,) = (tmp_path / "kept").iterdir()
        assert "ModuleNotFoundError" in (kept / "logs" / "gpu1.log").read_text()

    def test_the_second_ctrl_c_ends_what_does_not_end(self, tmp_path):
        """The exit code stays that of the program."""
        with terminal("run", "--", sys.executable, "-c", "print('up'); input()") as shown:
            shown.until("up")
            (agentd,) = [
                pid
                for pid in procfs.children(shown.process.pid)
                if b"agentd" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            os.kill(agentd, signal.SIGSTOP)
            shown.type("\n")
            shown.until("waiting for the end of agentd of node0, ")
            shown.type("\x03")
            shown.until("waits for the end of agentd of node0: Ctrl-C once more kills them")
            shown.type("\x03")
            shown.until("agentd of node0 had not ended, and was killed")
            assert shown.end() == 0
        assert list((tmp_path / "heads").iterdir()) == []

    @pytest.mark.parametrize(("words", "code"), [(("no-such-program",), 127), (("/etc/passwd",), 126)])
    def test_a_program_that_cannot_run_starts_nothing(self, words, code, tmp_path):
        done = run("--", *words)
        assert (done.returncode, done.stderr.partition(":")[0]) == (code, "error")
        assert words[0] in done.stderr

    def test_a_run_without_a_program_says_how_to_give_one(self):
        done = run("--nodes", "2")
        assert done.returncode == 64
        assert "rlinf-actors run --nodes 2 -- python train.py" in done.stderr


def test_what_to_do_is_said_where_it_is_known():
    assert advice("ssh to gpu1", 127, "sh: exec: /p: not found") == "name the Python of that host by --python"
    assert "without a question" in advice("ssh to gpu1", 255, "Host key verification failed.")
    assert advice("agentd of node0", 127, "") == advice("ssh to gpu1", 1, "Killed") == ""


@pytest.mark.parametrize(
    ("name", "option", "says"),
    [
        (
            f"ann@{UNKNOWN}",
            "--hosts",
            r"^--hosts: ann@.* cannot be resolved \([^)]+\), and is no alias in ssh's config",
        ),
        ("gpu", "--hosts", r"invalid, which is gpu in ssh's configuration, cannot be resolved \([^)]+\)$"),
        (UNKNOWN, "--slurm", r"^--slurm: .*invalid cannot be resolved \([^)]+\)$"),
    ],
)
def test_a_name_without_an_address_is_said_to_be_unresolved(name, option, says):
    with pytest.raises(ConfigError, match=says):
        common_address({name: UNKNOWN}, option)
