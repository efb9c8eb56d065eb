"""`mapped_driver.py NAMESPACE RANK [CONFIG [LOGS]]`: a driver with one worker, on the node RANK.

CONFIG is JSON of the `cluster:` section, and "launch" for options of the launch; LOGS the distributed_log_dir. Each
line on stdin is a JSON list, the name of a method of Spy and its arguments; the answer is a line with the result, or
with "Class: text" of an error.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from rlinf_actors import Cluster, NodePlacementStrategy, RlinfActorsError, Worker


class Spy(Worker):
    """Says as whom it runs, and tries what it should not be able to do."""

    def who(self) -> dict[str, Any]:
        status = Path("/proc/self/status").read_text()
        umask = os.umask(0)
        os.umask(umask)
        return {
            "pid": os.getpid(),
            "uids": os.getresuid(),
            "gids": os.getresgid(),
            "groups": sorted(os.getgroups()),
            "capabilities": [line for line in status.splitlines() if line.startswith(("CapPrm", "CapEff", "CapAmb"))],
            "env": {name: os.environ.get(name) for name in ("HOME", "USER", "LOGNAME", "SHELL", "XDG_CONFIG_HOME")},
            "cgroups": Path("/proc/self/cgroup").read_text(),
            "umask": umask,
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "dumpable": os.access(f"/proc/{os.getpid()}/mem", os.R_OK),
        }

    def pid(self) -> int:
        return os.getpid()

    def rests(self) -> None:
        """Run until this process is ended."""
        threading.Event().wait()

    def say(self, text: str) -> None:
        print(text, flush=True)

    def here(self) -> dict[str, Any]:
        """Where it runs, and a file of its driver's code."""
        found = os.stat(".")
        files = {name: Path(name).read_text() for name in os.listdir() if name.endswith(".txt")}
        return {"cwd": os.getcwd(), "uid": found.st_uid, "files": files}

    def spawn(self) -> int:
        """Start a process that hides: in a session of its own, without an environment."""
        import subprocess

        return subprocess.Popen(["sleep", "600"], env={}, start_new_session=True).pid

    def changes_its_limits(self) -> dict[str, str]:
        """What comes of writing to the files of its cgroups."""
        found = {}
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, name, place = line.split(":", 2)
            files = {"memory": "memory.limit_in_bytes", "pids": "pids.max", "": "memory.max"}
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified") if not name else (f"/sys/fs/cgroup/{name}",):
                path = f"{root}{place}/{files.get(name, '')}"
                if name in files and os.path.isfile(path):
                    try:
                        Path(path).write_text("-1")
                        found[path] = "written"
                    except OSError as error:
                        found[path] = type(error).__name__
        return found

    def forks(self, most: int) -> int:
        """Start processes that wait, *most* at most, and end them; return how many could be started."""
        import subprocess

        started: list[subprocess.Popen[bytes]] = []
        try:
            while len(started) < most:
                started.append(subprocess.Popen(["sleep", "600"]))
        except BlockingIOError:
            pass
        for one in started:
            one.kill()
            one.wait()
        return len(started)

    def takes(self, mib: int) -> int:
        """Use this much memory."""
        return len(bytearray(b"x") * (mib << 20))

    def lies(self, packet: list[Any]) -> str:
        """Send agentd a packet, or nonsense, in the place of this worker's template: its descriptors are open to the
        template's user.
        """
        import ctypes

        from rlinf_actors.wire import template_protocol

        pidfd_getfd, control = 438, 3
        fd = ctypes.CDLL(None, use_errno=True).syscall(pidfd_getfd, os.pidfd_open(os.getppid()), control, 0)
        if fd < 0:
            return os.strerror(ctypes.get_errno())
        with socket.socket(fileno=fd) as sock:
            name, *fields = packet or [""]
            sock.send(template_protocol.encode(getattr(template_protocol, name)(*fields)) if name else b"\xc1")
        return "sent"

    def id(self) -> str:
        return str(self._context.spec.id)

    def write(self, path: str) -> int:
        Path(path).write_text("x")
        return Path(path).stat().st_uid

    def tries(self, paths: list[str]) -> dict[str, str]:
        """What opening each path leads to: "open", or the error."""
        found = {}
        for path in paths:
            try:
                if os.path.isdir(path):
                    found[path] = f"{len(os.listdir(path))} entries"
                else:
                    with open(path, "rb") as file:
                        found[path] = f"{len(file.read(1))} bytes"
            except OSError as error:
                found[path] = type(error).__name__
        return found

    def tries_sockets(self, paths: list[str]) -> dict[str, str]:
        found = {}
        for path in paths:
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
                with socket.socket(socket.AF_UNIX, kind) as sock:
                    try:
                        sock.connect(path)
                        found[path] = "connected"
                    except OSError as error:
                        found.setdefault(path, type(error).__name__)
        return found

    def replace_by_link(self, folder: str, target: str) -> None:
        """Put links to *target* in the place of this worker's log files, and of their directory."""
        os.rename(folder, f"{folder}.aside")
        os.mkdir(folder)
        for name in os.listdir(f"{folder}.aside"):
            os.symlink(target, f"{folder}/{name}")

    def token(self) -> str:
        return str(self._context.spec.token)

    def tries_adoption(self, paths: list[str]) -> str:
        """What templates and the keeper answer to a worker that says what an agentd would."""
        from rlinf_actors.wire.template_protocol import Adopt, encode  # the class is pickled, and an encoder cannot be

        found = set()
        for path in paths:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(30)
                sock.connect(path)
                hello = json.dumps({"do": "hello", "keep": True}).encode()
                try:
                    sock.send(hello if path.endswith("keeper") else encode(Adopt()))
                    found.add("closed" if not sock.recv(65536) else "answered")
                except ConnectionError:
                    found.add("closed")
        return " ".join(sorted(found))

    def tries_process(self, pid: int) -> dict[str, str]:
        """What reaching into another process leads to."""
        found = self.tries([f"/proc/{pid}/{name}" for name in ("mem", "environ", "maps", "fd", "map_files", "cwd/.")])
        try:
            os.kill(pid, 0)
            found["kill"] = "sent"
        except OSError as error:
            found["kill"] = type(error).__name__
        return found


def main() -> None:
    os.environ["CLUSTER_NAMESPACE"] = sys.argv[1]
    try:
        rank = int(sys.argv[2])
        config = {"num_nodes": rank + 1, **json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")}
        options = config.pop("launch", {})
        cluster = Cluster(cluster_cfg=config, distributed_log_dir=sys.argv[4] if len(sys.argv) > 4 else None)
        group = Spy.create_group().launch(cluster, NodePlacementStrategy([rank]), name="spy", **options)
        group.pid().wait()
    except RlinfActorsError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
        return
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            [answer] = getattr(group, name)(*arguments).wait()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer, default=sorted), flush=True)


if __name__ == "__main__":
    main()
