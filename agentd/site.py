"""Where the workers of this node run: decided by the daemon, once, and the same for all that start and end workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentd.launch import Rules
from rlinf_actors.wire.spawn import WorkerPlace
from rlinf_actors.wire.values import ResourceReport


@dataclass(frozen=True)
class Site:
    """What a worker finds here, and what holds for all of them.

    Attributes:
        rules: which interpreters may be started, where output and cgroups go.
        run_dir: directory for sockets; exists, is ours alone.
        head: the coordinator's endpoint, as workers are told it.
        node_ip: the node's address.
        host: equal for processes that can talk over ipc.
        environment: the node's, asked for at every launch.
        listen_ip: where workers bind TCP, "" for ipc only.
        head_key: the head's public key, "" in a cluster without keys.
        resources: what the node has, for the accelerators' locks.
        owner_pid: process whose end is the end of every worker; None without one.
        keep_s: workers without robots go on that many seconds when agentd is gone, for the next one to adopt; None:
            they end with it.
        keeper: the socket of rlinf-workers@.service, whose keeper starts templates; "": agentd starts a keeper itself.
        entry: ``module:function`` that runs a worker; see worker.template.
    """

    rules: Rules
    run_dir: Path
    head: str
    node_ip: str
    host: str
    environment: Callable[[], Mapping[str, str]]
    listen_ip: str = ""
    head_key: str = ""
    resources: Sequence[ResourceReport] = ()
    owner_pid: int | None = None
    keep_s: float | None = None
    keeper: str = ""
    entry: str = "rlinf_actors.worker.main:run_worker"

    @property
    def node(self) -> str:
        """The node's name."""
        return self.rules.node

    def place(self, out_path: str, err_path: str, lease_until: float, lease_s: float) -> WorkerPlace:
        """What a worker is told of where it is; see WorkerPlace."""
        return WorkerPlace(
            run_dir=str(self.run_dir),
            host=self.host,
            head=self.head,
            node=self.node,
            node_ip=self.node_ip,
            listen_ip=self.listen_ip,
            out_path=out_path,
            err_path=err_path,
            lease_until=lease_until,
            lease_s=lease_s,
            head_key=self.head_key,
        )
