"""`rlinf-actors run --hosts`: nodes on other hosts, with real sshds in network namespaces."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import netns_kit
import pace
import pytest
from netns_kit import Host

from rlinf_actors import procfs
from rlinf_actors.cluster.local_daemon import processes_with
from rlinf_actors.settings import TEST_MARK

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "run-a-program.md"

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.skipif(not os.path.exists(SSHD), reason="needs openssh-server"),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root, to make network namespaces"),
]


class Cell:
    """Three hosts: commands run on the first, gpu1 and gpu2 have an sshd. gpu3 is an address of nobody."""

    def __init__(self, folder: Path, here: Host) -> None:
        self.config = folder / "config"
        self._folder = folder
        self._here = here

    def start(self, *words: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            self._here.command(words), cwd=self._folder, env={**os.environ, "PATH": path}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str) -> tuple[int, str, str]:
        with self.start(*words) as process:
            try:
                out, err = process.communicate(timeout=pace.PATIENCE_S)
            finally:
                process.kill()
        return process.returncode, out, err


@pytest.fixture
def cell(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # sshd wants it where no package's service has made it
    monkeypatch.setenv("RLINF_ACTORS_KEPT_LOGS", str(place / "kept"))
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True)
    shutil.copy(place / "user.pub", place / "authorized")
    (text,) = re.findall(r"^```python\n(# train.py\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    (place / "train.py").write_text(text)
    (place / "waits.py").write_text(text.replace("print(nodes)", "print(nodes, flush=True); await asyncio.sleep(1000)"))
    server = place / "sshd_config"
    server.write_text(
        f"HostKey {place}/host\nAuthorizedKeysFile {place}/authorized\nStrictModes no\nUsePAM no\nPidFile none\n"
        f"PermitRootLogin yes\nAcceptEnv {TEST_MARK}\n"
    )
    with netns_kit.hosts(3) as hosts:
        known = (place / "host.pub").read_text()
        (place / "known").write_text("".join(f"{host.ip} {known}" for host in hosts))
        aliases = [*((f"gpu{n}", host.ip) for n, host in enumerate(hosts) if n), ("gpu3", "10.213.7.77")]
        cell = Cell(place, hosts[0])
        cell.config.write_text(
            "".join(f"Host {name}\n  HostName {ip}\n" for name, ip in aliases)
            + f"Host *\n  User root\n  IdentityFile {place}/user\n  UserKnownHostsFile {place}/known\n"
        )
        servers = []
        try:
            for host in hosts[1:]:
                command = host.command([SSHD, "-D", "-e", "-f", str(server)])
                servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
            for process in servers:
                assert process.stderr is not None
                assert "listening" in process.stderr.readline()
            yield cell
        finally:
            for process in servers:
                process.terminate()
                process.communicate()


def test_the_program_has_a_node_on_each_host(cell):
    (command,) = re.findall(r"^    (rlinf-actors run --hosts .*)$", PAGE.read_text(), re.M)
    code, out, err = cell.run("sh", "-c", command.replace("--hosts", f'--ssh "ssh -F {cell.config}" --hosts'))
    assert (code, out) == (0, "[0, 1]\n"), err
    assert all(line.startswith("waiting for nodes: ") for line in err.splitlines()), err


def test_a_host_that_cannot_be_reached_ends_the_run_with_the_words_of_ssh(cell):
    command = [
        "rlinf-actors",
        "run",
        "--ssh",
        f"ssh -F {cell.config} -o ConnectTimeout=1",
        "--hosts",
        "gpu1,gpu3",
        "--",
    ]
    code, _, err = cell.run(*command, "true")
    assert code == 1
    why = "ssh to it has to work without a question: by a key, and to a known host; the last lines of its log:"
    assert f"ssh to gpu3 has ended with exit code 255; {why}\n    ssh: connect to host" in err


def test_nodes_end_with_their_connections_and_nothing_is_left_of_a_killed_run(cell, rlinf_leak_check):
    ssh = f"ssh -F {cell.config} -o SetEnv={TEST_MARK}={os.environ[TEST_MARK]}"
    words = ["rlinf-actors", "run", "--ssh", ssh, "--hosts", "gpu1,gpu2", "--", "python", "waits.py"]
    with cell.start(*words) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "[0, 1]\n", process.stderr.read()
            (second,) = [
                pid for pid in procfs.children(process.pid) if b"gpu2\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            os.kill(second, signal.SIGKILL)
            lines = iter(process.stderr.readline, "")
            said = next(line for line in lines if not line.startswith("waiting for nodes: "))  # on a slow machine
            assert said.startswith("ssh to gpu2 was ended by SIGKILL")
        finally:
            process.kill()
        process.wait()
        assert pace.again_like(lambda: processes_with(TEST_MARK, os.environ[TEST_MARK]), []) == []
