"""A machine on which a person follows a page: a host with a home of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import netns_kit
import pace


class Machine:
    """A host with a home directory of its own, in which the project is installed, as after the first step."""

    def __init__(self, host: netns_kit.Host, home: Path) -> None:
        self.host, self._home = host, home
        self.daemons: list[subprocess.Popen[str]] = []
        for name in ("run", "heads"):
            home.joinpath(name).mkdir(mode=0o700, parents=True)
        home.joinpath(".venv").symlink_to(sys.prefix)

    def start(self, command: str) -> subprocess.Popen[str]:
        # what is a machine's own
        own = {"HOME": "", "XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "RLINF_ACTORS_HEADS": "heads"}
        env = {name: str(self._home / place) for name, place in own.items()}
        return subprocess.Popen(
            self.host.command(["bash", "-c", command]), cwd=self._home,
            env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, command: str) -> tuple[str, str]:
        with self.start(command) as process:
            out, err = process.communicate(timeout=pace.PATIENCE_S)
        assert process.returncode == 0, f"{command}: {err}"
        return out, err

    def run_daemon(self, command: str, text: str = " is registered") -> None:
        """Return when the node is registered, or *text* is there, as its terminal says."""
        self.daemons.append(self.start(command if "=" in command.split()[0] else f"exec {command}"))
        said = ""
        while text not in said:
            line = self.daemons[-1].stderr.readline()
            assert line, f"{command}: {said}"
            said += line

    def interrupt(self) -> None:
        """Press Ctrl-C in the terminals of the daemons."""
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGINT)
            with daemon:
                daemon.communicate(timeout=pace.PATIENCE_S)
            assert daemon.returncode == 0
        self.daemons.clear()

    def kill(self) -> None:
        """End the daemons that run."""
        for daemon in self.daemons:
            if daemon.poll() is None:
                daemon.kill()
                daemon.communicate()
