"""Arguments of Cluster, and whether they ask for the Cluster that is running already."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from rlinf_actors.cluster.hardware import read_config
from rlinf_actors.config.cluster import ClusterConfig
from rlinf_actors.errors import ConfigError
from rlinf_actors.hardware.configured import without_types
from rlinf_actors.net.address import endpoint_of
from rlinf_actors.net.discovery import CLIENT_FILE, PRIVATE, check_name, client_settings
from rlinf_actors.net.security import is_tcp
from rlinf_actors.settings import Settings


@dataclass(frozen=True)
class Asked:
    """Arguments as they were given; None: not given."""

    num_nodes: int | None = None
    cluster_cfg: Any = None
    log_dir: str | os.PathLike[str] | None = None
    head: str | None = None
    namespace: str | None = None
    keys: str | None = None

    def config(self) -> ClusterConfig | None:
        """The configuration, checked. Raises ConfigError."""
        if self.cluster_cfg is None:
            return None
        return read_config(self.cluster_cfg)

    def settings(self) -> Settings:
        """Those of the environment and the client file, with the keys that are given."""
        settings = client_settings()
        return settings if self.keys is None else replace(settings, key_dir=self.keys, key_file=None)

    def directory(self) -> str | None:
        """The log directory as an absolute path."""
        return None if self.log_dir is None else os.path.abspath(os.fspath(self.log_dir))

    def wanted(self, config: ClusterConfig | None, otherwise: int) -> int:
        """How many nodes to wait for. Raises ConfigError."""
        given = self.num_nodes
        if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
            raise ConfigError(f"is {given!r}; it must be a whole number above 0", path="num_nodes")
        if config is not None and given is not None and config.num_nodes != given:
            raise ConfigError(
                f"is {config.num_nodes} in cluster_cfg and {given} as an argument: give one of them",
                path="cluster.num_nodes",
            )
        return given or (config.num_nodes if config is not None else otherwise)

    def endpoint(self, settings: Settings, wanted: int) -> str:
        """The head's, "" for a private one. Blocks where it has a name to resolve.

        Raises:
            ConfigError: its name has no address, or none is named and *wanted* nodes are too many for a private one.
        """
        head = self.head or settings.head
        if head and head != PRIVATE:
            source = "head" if self.head else settings.head_from
            endpoint = endpoint_of(head, source)
            check_name(endpoint, source)
            return endpoint
        if wanted > 1:
            raise ConfigError(
                f"is {wanted}, and no head is known: start `agentd --head` on one node and "
                f"`agentd --connect HOST:PORT` on the others, then pass head='HOST:PORT', set RLINF_HEAD, or write "
                f'head = "HOST:PORT" into /etc/{CLIENT_FILE}',
                path="num_nodes",
            )
        return ""


@dataclass(frozen=True)
class InUse:
    """What the arguments of the running Cluster, and the defaults of the others, came to.

    Attributes:
        num_nodes: nodes that it has; in a worker, also how many its owner's cluster has.
        config: the configuration.
        log_dir: an absolute path.
        head: the head's endpoint.
        namespace: of the job.
    """

    num_nodes: tuple[int, ...]
    config: ClusterConfig | None
    log_dir: str | None
    head: str
    namespace: str

    def check(self, asked: Asked) -> None:
        """See that whoever asked so means this Cluster: what is given has the same effect.

        Raises:
            ConfigError: it asks for another; `path` is the argument's name.
        """
        if asked.num_nodes is not None and asked.num_nodes not in self.num_nodes:
            raise _differs("num_nodes", self.num_nodes[0], asked.num_nodes)
        config = asked.config()
        if config is not None and (self.config is None or without_types(config) != without_types(self.config)):
            raise _differs("cluster_cfg", self.config, asked.cluster_cfg)
        if asked.log_dir is not None and asked.directory() != self.log_dir:
            raise _differs("distributed_log_dir", self.log_dir, os.fspath(asked.log_dir))
        if asked.head is not None and not self._is_at(asked.head):
            raise _differs("head", self.head, asked.head)
        if asked.namespace is not None and asked.namespace != self.namespace:
            raise _differs("namespace", self.namespace, asked.namespace)

    def _is_at(self, head: str) -> bool:
        return not is_tcp(self.head) if head == PRIVATE else endpoint_of(head, "head") == self.head


def _differs(name: str, old: object, new: object) -> ConfigError:
    return ConfigError(
        f"a Cluster with {name}={old!r} is running in this process, and {name}={new!r} was asked for: "
        f"call shutdown() on it first, or use the running one by Cluster()",
        path=name,
    )
