"""What a second user of the machine tries with the first one's cluster. Takes facts, prints outcomes; both as JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlinf_actors import Cluster, RlinfActorsError, Worker
from rlinf_actors.cli import queries
from rlinf_actors.security.keyfile import who
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import Drained, DrainNode, EStop, EStopped

queries.TIMEOUT_S = 20.0  # of what `rlinf-actors` asks: each attempt ends by what it is told, before that


class Mine(Worker):
    """The stranger's own."""

    def uid(self) -> int:
        return os.getuid()


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
    head = facts["head"]
    os.environ["CLUSTER_NAMESPACE"] = facts["namespace"]
    node = ["--connect", head, "--run-dir", f"{os.environ['HOME']}/r", "--node-id", "x", "--name", "strange"]
    pipe = subprocess.PIPE
    agent = subprocess.Popen([sys.executable, "-m", "agentd", *node], stderr=pipe, text=True)
    said: dict[str, Any] = {"uid": os.getuid()}
    said["sockets"] = [outcome(lambda path=path: connect(path)) for path in facts["sockets"]]
    said["processes"] = [outcome(lambda pid=pid: os.kill(pid, 0)) for pid in facts["pids"]]
    said["memory"] = [outcome(lambda pid=pid: os.listdir(f"/proc/{pid}/fd")) for pid in facts["pids"]]
    said["key"] = outcome(lambda: open(facts["key"]).read())  # noqa: SIM115
    said["status"] = outcome(lambda: queries.find_head(None, Settings.load()))
    said["by directory"] = outcome(lambda: queries.status_of(facts["run_dir"]))
    tries = [
        lambda: queries.status_of(head),
        lambda: queries.ask_head(head, EStop(who(), "", None), EStopped),
        lambda: queries.ask_head(head, DrainNode("node-0", who(), ""), Drained),
        lambda: Cluster(num_nodes=1, head=head, timeout=queries.TIMEOUT_S),
    ]
    with ThreadPoolExecutor(len(tries)) as pool:
        said["by port"] = list(pool.map(outcome, tries))
    with Cluster(num_nodes=1) as cluster:  # the defaults, and the same names
        said["mine"] = Mine.create_group().launch(cluster, name="theirs").uid().wait()
        mine, status = queries.status_of(None)
        said["my groups"] = [mine, [group.name for group in status.groups]]
    agent.terminate()  # it has tried as long as all of this took
    _, log = agent.communicate()
    said["agentd"] = [agent.returncode, log]
    print(json.dumps(said))


if __name__ == "__main__":
    main()
