"""A stand-in for systemd that runs the shipped unit's agentd, and a worker class that returns facts about itself."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import uuid
from pathlib import Path

from rlinf_actors import Worker
from rlinf_actors.settings import KEY_DIR
from rlinf_actors.systemd import unit_files

RESULTS = {True: ("exited", "exit-code"), False: ("killed", "signal")}


class Sitting(Worker):
    def pids(self) -> tuple[int, int]:
        """The pids of this process and its template."""
        return os.getpid(), os.getppid()

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


class StandIn:
    """systemd, as far as rlinf-agentd@.service needs it: ExecStart, ExecStopPost, Restart, directories, notifications.

    Args:
        place: a short directory of the test's own.
        config: agentd's configuration file.
        keys: its key directory.
        watchdog_s: instead of the unit's WatchdogSec.
    """

    def __init__(self, place: Path, config: Path, keys: str, watchdog_s: float = 30.0) -> None:
        self.place = place
        self.lines = [
            line.partition("=")[::2] for line in unit_files.text(unit_files.AGENTD).splitlines() if "=" in line
        ]
        self.run_dir = place / "run"
        self.journal = open(place / "journal", "a+")  # noqa: SIM115 - closed by close()
        found = os.fstat(self.journal.fileno())
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(place / "notify"))
        self.manager.settimeout(60)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RLINF")}
        self._env = {
            **clean,
            KEY_DIR: keys,
            "RLINF_ACTORS_CONFIG": str(config),
            "NOTIFY_SOCKET": str(place / "notify"),
            "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
            "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}",
            "RUNTIME_DIRECTORY": str(self.run_dir),
            "STATE_DIRECTORY": str(place / "state"),
            "LOGS_DIRECTORY": str(place / "logs"),
        }
        self.said: list[dict[str, str]] = []
        self.process: subprocess.Popen[bytes] | None = None

    def value(self, key: str) -> str:
        """The value of the unit's last line with this key."""
        return [value for name, value in self.lines if name == key][-1]

    def start(self) -> None:
        """The start job: returns when agentd has sent READY."""
        self.begin()
        self.wait_for("READY")

    def begin(self) -> None:
        """Make the directories and run ExecStart=."""
        for name in ("run", "state", "logs"):
            (self.place / name).mkdir(mode=0o700, exist_ok=True)
        # what systemd does between fork and exec
        child = '{ echo "$0" > /proc/self/oom_score_adj; } 2>/dev/null; WATCHDOG_PID=$$ SYSTEMD_EXEC_PID=$$ exec "$@"'
        command = ["/bin/sh", "-c", child, self.value("OOMScoreAdjust"), *shlex.split(self.value("ExecStart"))]
        env = {**self._env, "INVOCATION_ID": uuid.uuid4().hex}
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=self.journal, stderr=self.journal
        )

    def wait_for(self, name: str) -> dict[str, str]:
        """Wait for the next notification with *name*; earlier ones are in `said`."""
        while True:
            fields = dict(line.split("=", 1) for line in self.manager.recv(4096).decode().splitlines())
            self.said.append(fields)
            if name in fields:
                return fields

    def ended(self, result: str = "") -> bool:
        """Wait for agentd's end and clean up as the unit says; return True if Restart= would start it again."""
        assert self.process is not None
        code = self.process.wait(60)
        kind, failure = RESULTS[code >= 0]
        result = result or ("success" if code == 0 else failure)
        env = {**self._env, "SERVICE_RESULT": result, "EXIT_CODE": kind, "EXIT_STATUS": str(abs(code))}
        subprocess.run(
            shlex.split(self.value("ExecStopPost")), env=env, stdout=self.journal, stderr=self.journal, check=True,
            timeout=60,
        )  # fmt: skip
        assert self.value("Restart") == "always"
        return str(code) not in self.value("RestartPreventExitStatus").split()

    def stop(self) -> None:
        """A stop job: KillMode=process, then the directory goes."""
        assert self.process is not None
        self.process.terminate()
        self.ended()
        shutil.rmtree(self.run_dir)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def written(self) -> list[str]:
        """The lines of the journal."""
        self.journal.seek(0)
        return self.journal.read().splitlines()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.ended("timeout")
        self.manager.close()
        self.journal.close()


def configured(place: Path, head: str) -> Path:
    """Write agentd.toml and the files that it names, for a node that joins *head*."""
    (place / "hw.json").write_text(json.dumps({"ip": "127.0.0.9"}))
    path = place / "agentd.toml"
    path.write_text(
        f'[head]\nconnect = "{head}"\n[node]\nid = "unit"\nname = "unit"\nrank = 1\n'
        f'[hardware]\ndescribed = "{place}/hw.json"\n'
    )
    return path
