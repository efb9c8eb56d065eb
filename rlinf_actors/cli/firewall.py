"""Rules for nftables that admit only a cluster's machines to the ports of its head, its workers and torch."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlinf_actors.cli.queries import status_of
from rlinf_actors.errors import ConfigError
from rlinf_actors.model.accelerator_table import ACCELERATOR_TABLE, ALWAYS_NIC_VARIABLES
from rlinf_actors.net.host import split_address
from rlinf_actors.settings import COMM_NET_DEVICES
from rlinf_actors.version import VERSION
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.values import NodeReport

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
"""The range from which the kernel of this machine takes the ports of workers and of torch."""
TABLE = "inet rlinf_actors"
NIC_VARIABLES = {*ALWAYS_NIC_VARIABLES, *(facts.nic_variable for facts in ACCELERATOR_TABLE.values())} - {""}
"""Environment variables that name the interfaces of collectives."""


def network(text: str, path: str) -> Network:
    """Return the address or network *text*. Raises ConfigError, which names *path*, if it is none."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ConfigError(f"is {text!r}; it must be an address or a network, such as 10.0.0.0/24", path=path) from None


def port_range(text: str, path: str) -> tuple[int, int]:
    """Return the first and last port of *text*, such as "32768-60999". Raises ConfigError, which names *path*."""
    words = text.replace("-", " ").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not 0 < int(words[0]) <= int(words[1]) < 65536:
        raise ConfigError(f"is {text!r}; it must be FIRST-LAST, such as 32768-60999", path=path)
    return int(words[0]), int(words[1])


def of_cluster(head: str | None, namespaces: Sequence[str], peers: Sequence[str], ports: str | None) -> str:
    """Return `rules` for the cluster of a head. The arguments are values of options of `rlinf-actors units print`.

    Raises:
        ConfigError: an option has a wrong value.
    """
    endpoint, status = status_of(head)
    if not endpoint.startswith("tcp://"):
        raise ConfigError("names a unix socket; it must be HOST:PORT, whose port the rules open", path="--head")
    chosen = port_range(ports, "--ports") if ports else port_range(Path(PORT_RANGE).read_text(), PORT_RANGE)
    further = {network(text, "--peer") for text in peers}
    nodes = [(node.rank, addresses(node.report)) for node in status.nodes if node.state != "lost"]
    ranks = _ranks(status, namespaces) if namespaces else {rank for rank, _ in nodes}
    every = further.union(*(found for _, found in nodes))
    near = further.union(*(found for rank, found in nodes if rank in ranks))
    return rules(split_address(endpoint, "--head")[1], chosen, every, near)


def _ranks(status: Status, namespaces: Sequence[str]) -> set[int]:
    """Return the ranks of the nodes where the jobs *namespaces* have workers."""
    missing = sorted(set(namespaces) - {group.namespace for group in status.groups})
    if missing:
        raise ConfigError(f"is {missing[0]!r}, a job without groups: where it runs is not known yet", path="--job")
    workers = (worker for group in status.groups if group.namespace in namespaces for worker in group.workers)
    return {worker.node_rank for worker in workers if worker.state != "gone"}


def addresses(node: NodeReport) -> set[Network]:
    """Return the addresses from which a node's processes may connect: of itself, and of the interfaces that its address
    and its collectives use.
    """
    chosen = {node.interface, *map(str.strip, node.env_vars.get(COMM_NET_DEVICES, "").split(","))}
    texts = [node.env_vars[name] for name in NIC_VARIABLES if name in node.env_vars]
    used = (ip for name, ip in node.interfaces.items() if name in chosen or any(_uses(text, name) for text in texts))
    return {_address(ip, node.node_id) for ip in (node.ip, *used)}


def _uses(text: str, interface: str) -> bool:
    """Return True if *text*, the value of one of NIC_VARIABLES, means *interface*, as NCCL reads it.

    The names are beginnings of names, behind "=" whole names; behind "^" they are those that are not used.
    """
    names = [name.strip() for name in text.lstrip("^=").split(",") if name.strip()]
    found = interface in names if text[:1] == "=" else any(map(interface.startswith, names))
    return found != (text[:1] == "^")


def _address(ip: str, node: str) -> Network:
    """Return the network of one address. A node names only addresses: a network would open the ports to strangers."""
    try:
        return ipaddress.ip_network(ipaddress.ip_address(ip))
    except ValueError:
        raise ConfigError(f"is {ip!r}, and no address", path=f"address of node {node}") from None


def rules(head_port: int, ports: tuple[int, int], nodes: Iterable[Network], peers: Iterable[Network]) -> str:
    """Return a file for `nft -f`, which replaces the rules of an earlier file.

    Args:
        head_port: the head's port, which the rules open to *nodes*.
        ports: first and last port of workers and of torch, which the rules open to *peers*.
        nodes: addresses of all nodes of the cluster.
        peers: addresses of the machines whose workers and drivers connect to the workers here.
    """
    every, near, (first, last) = set(nodes), set(peers), ports
    sets = "".join(
        _set(f"{name}{version}", version, (one for one in found if one.version == version))
        for name, found in (("nodes", every), ("peers", near))
        for version in (4, 6)
    )
    return f"""\
#!/usr/sbin/nft -f
# Written by rlinf-actors {VERSION}: who may open connections to the cluster's ports on this machine.
# Load it on each node with `nft -f FILE`, and write it again when machines join or change their addresses.
table {TABLE}
delete table {TABLE}
table {TABLE} {{
{sets}
    chain input {{
        type filter hook input priority -10; policy accept;
        iifname "lo" accept
        meta l4proto != tcp accept
        tcp flags & (fin | syn | rst | ack) != syn accept
        tcp dport {head_port} ip saddr @nodes4 accept
        tcp dport {head_port} ip6 saddr @nodes6 accept
        tcp dport {first}-{last} ip saddr @peers4 accept
        tcp dport {first}-{last} ip6 saddr @peers6 accept
        tcp dport {{ {", ".join(_ports(head_port, first, last))} }} counter drop
    }}
}}
"""


def _set(name: str, version: int, found: Iterable[Network]) -> str:
    texts = [str(one) for one in sorted(found, key=lambda one: (int(one.network_address), one.prefixlen))]
    elements = f" elements = {{ {', '.join(texts)} }};" if texts else ""
    return f"    set {name} {{ type ipv{version}_addr; flags interval; auto-merge;{elements} }}\n"


def _ports(head_port: int, first: int, last: int) -> list[str]:
    return [f"{first}-{last}"] if first <= head_port <= last else [str(head_port), f"{first}-{last}"]
