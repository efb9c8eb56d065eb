"""What a second user of the machine tries with the first one's cluster. Takes facts, prints outcomes; both as JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rlinf_actors import Cluster, RlinfActorsError, Worker

CLI = [sys.executable, "-m", "rlinf_actors.cli.main"]


class Mine(Worker):
    """The stranger's own."""

    def uid(self) -> int:
        return os.getuid()


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate()
    return process.returncode, out


def cli(*arguments: str) -> tuple[int, str]:
    return ended(start([*CLI, *arguments]))


def outcome(attempt: Callable[[], Any]) -> str:
    try:
        return f"did it: {attempt()!r}"
    except (OSError, RlinfActorsError) as error:
        return f"{type(error).__name__}: {error}"


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.connect(path)


def main() -> None:
    facts = json.loads(sys.argv[1])
    head, run_dir = facts["head"], facts["run_dir"]
    os.environ["CLUSTER_NAMESPACE"] = facts["namespace"]
    said: dict[str, Any] = {"uid": os.getuid()}
    said["sockets"] = [outcome(lambda path=path: connect(path)) for path in facts["sockets"]]
    said["processes"] = [outcome(lambda pid=pid: os.kill(pid, 0)) for pid in facts["pids"]]
    said["memory"] = [outcome(lambda pid=pid: os.listdir(f"/proc/{pid}/fd")) for pid in facts["pids"]]
    said["key"] = outcome(lambda: open(facts["key"]).read())  # noqa: SIM115
    here = [start([*CLI, "status"]), start([*CLI, "status", "--head", run_dir])]
    node = ["--connect", head, "--run-dir", f"{os.environ['HOME']}/r", "--node-id", "x", "--name", "strange"]
    agent = start([sys.executable, "-m", "agentd", *node])
    tries = [
        start([*CLI, *command, "--head", head])
        for command in (["status"], ["estop", "--reason", "me"], ["node", "drain", "node0"])
    ]
    said["driver"] = outcome(lambda: Cluster(num_nodes=1, head=head, timeout=1))
    said["by port"] = [ended(one) for one in tries]
    agent.terminate()  # it has tried as long as they have
    said["agentd"] = ended(agent)
    said["status"], said["by directory"] = (ended(one) for one in here)
    with Cluster(num_nodes=1) as cluster:  # the defaults, and the same names
        said["mine"] = Mine.create_group().launch(cluster, name="theirs").uid().wait()
        said["my status"] = cli("groups", "--json")
    print(json.dumps(said))


if __name__ == "__main__":
    main()
