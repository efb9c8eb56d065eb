"""A head with keys, and agentds of other users of this machine: real processes under real uids."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pace

from rlinf_actors.cli import app
from rlinf_actors.cli.queries import observing
from rlinf_actors.net.host import HeldPorts
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import Events, GetEvents

ROOT = Path(__file__).parents[2]
VICTIM, THIEF = 61011, 61012
TIMERS = f"[timers]\nbeat_s = {0.2 * pace.slowness}\nlease_s = {15.0 * pace.slowness}\n"
"""No test waits for the lease: a node that is killed must be back before, or another may be it."""


OTHER_USER = ROOT / "tests" / "live" / "other_user.py"


def why_not() -> str:
    """Return why no process of another user can be started here, or ""."""
    if os.getuid() != 0:
        return "needs root"
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    return done.stderr.decode().strip() if done.returncode else ""


class Agentd:
    """An agentd of the user *uid*, in the user's own run directory; it says to the head that it runs as *says*."""

    def __init__(
        self, machine: Machine, name: str, uid: int, *arguments: str, node: str = "n1", says: str = ""
    ) -> None:
        home = machine.home(uid)
        self.log = machine.place / f"{name}.log"
        script = Path(__file__).with_name("agentd_script.py")
        command = [sys.executable, str(OTHER_USER), str(uid), str(home), str(script), says]
        command += ["--connect", machine.address, "--name", node, "--run-dir", str(home / name), *arguments]
        command += ["--log-dir", str(home / "logs"), "--hardware", str(machine.place / "hw.json")]
        if "--token" not in arguments:
            command += ["--config", str(home / "agentd.toml")]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(command, env=machine.env(home), stderr=log)
        machine.stack.callback(self.end)

    def logged(self, text: str) -> None:
        """Wait until its log has this text."""
        with subprocess.Popen(["tail", "-n", "+1", "-F", self.log], stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            assert any(text in line for line in tail.stdout)
            tail.kill()

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(pace.PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Machine:
    """The head runs as root; each user has a home with key directory ``keys``."""

    def __init__(self, place: Path, stack: contextlib.ExitStack) -> None:
        self.place, self.stack, self.seen = place, stack, 0
        place.chmod(0o755)
        for name, text in (("agentd.toml", TIMERS), ("hw.json", "{}")):
            (place / name).write_text(text)
            (place / name).chmod(0o644)
        self.head_env = self.env(place / "head")
        self.run("keys", "init", "--name", "kim")
        port = stack.enter_context(contextlib.closing(HeldPorts())).hold()
        self.address = f"127.0.0.1:{port}"
        self.head = self.start_head()

    def env(self, home: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "XDG_", "NOTIFY"))}
        mark = {name: value for name, value in os.environ.items() if name == "RLINF_ACTORS_TEST"}
        own = {"HOME": str(home), "RLINF_ACTORS_KEYS": str(home / "keys"), "PYTHONPATH": str(ROOT)}
        own["XDG_STATE_HOME"] = str(home / "state")  # root's is /var/lib
        return {**kept, **mark, **own}

    def home(self, uid: int) -> Path:
        path = self.place / f"u{uid}"
        if not path.exists():
            path.mkdir(mode=0o700)
            (path / "keys").mkdir(mode=0o700)
            (path / "agentd.toml").write_text(f'[security]\nkey_file = "{path}/keys/agent.key"\n')
            os.chown(path, uid, uid)
            os.chown(path / "keys", uid, uid)
        return path

    def start_head(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "agentd", "--head", "--listen", self.address, "--ready-fd"]
        read, write = os.pipe()
        command += [str(write), "--config", str(self.place / "agentd.toml"), "--hardware", str(self.place / "hw.json")]
        command += ["--run-dir", str(self.place / "r"), "--log-dir", str(self.place / "logs")]
        with open(self.place / "head.log", "a") as log:
            head = subprocess.Popen(command, env=self.head_env, stderr=log, pass_fds=(write,))
        self.stack.callback(head.wait)
        self.stack.callback(head.terminate)
        os.close(write)
        with os.fdopen(read) as pipe:
            assert "head" in json.loads(pipe.readline() or "{}"), (self.place / "head.log").read_text()
        return head

    def run(self, *arguments: str, code: int = 0) -> Any:
        """Run `rlinf-actors ... --json` as the administrator, and return what it printed."""
        out, err = io.StringIO(), io.StringIO()
        environment = mock.patch.dict(os.environ, self.head_env, clear=True)
        with environment, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = app.run([*arguments, "--json"])
        assert found == code, err.getvalue()
        return json.loads(out.getvalue()) if code == 0 else err.getvalue()

    def admin(self, *arguments: str, code: int = 0) -> Any:
        return self.run(*arguments, "--head", str(self.place / "r"), code=code)

    def key_for(self, uid: int, *more: str) -> Path:
        """Enroll node n1 for the user *uid*; return the user's key file."""
        path = self.home(uid) / "keys" / "agent.key"
        self.admin("keys", "enroll", "n1", "--file", str(path), *more)
        os.chown(path, uid, uid)
        return path

    def copy(self, path: Path, uid: int) -> None:
        """Give a copy of a key file to the user *uid*, as a shared file would."""
        copy = self.home(uid) / "keys" / "agent.key"
        shutil.copy(path, copy)
        copy.chmod(0o600)
        os.chown(copy, uid, uid)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes that `rlinf-actors status` shows, by id."""
        return {node["id"]: node for node in self.run("nodes", "--head", str(self.place / "r"))}

    def until(self, kind: str, *words: str, not_: str = "") -> str:
        """Wait for an event of this kind whose text has these words, and not the word *not_*; return the text.

        Events that an earlier call has returned do not count.
        """

        async def wait() -> str:
            async with observing(f"ipc://{self.place}/r/head", Settings()) as client:
                while True:
                    answer = await client.request(GetEvents(self.seen, wait_s=20.0), pace.PATIENCE_S)
                    assert isinstance(answer, Events)
                    assert answer.events, f"no {kind} with {words}"
                    for event in answer.events:
                        self.seen = event.seq
                        fits = event.kind == kind and all(word in event.text for word in words)
                        if fits and not (not_ and not_ in event.text):
                            return event.text

        return asyncio.run(wait())


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="2u-", dir="/tmp") as place, contextlib.ExitStack() as stack:
        yield Machine(Path(place), stack)
