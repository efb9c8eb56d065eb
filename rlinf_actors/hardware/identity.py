"""Identities of robots: what tells a robot from all others, whatever a job calls it.

The ``enumerate`` of a hardware type calls `address_identities` and `device_identity` on the node that uses the robot,
because names mean something only there. They block as long as a name server does; `enumerate` has a time limit.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from rlinf_actors.errors import ConfigError
from rlinf_actors.model.hardware import HardwareInfo
from rlinf_actors.wire.values import Identity as Identity  # for users too

_LOOPBACK, _PORT = "localhost", " port "


def address_identities(
    host: str, node_rank: int, port: int | None = None, *, path: str = "", here: bool = True, required: bool = True
) -> list[Identity]:
    """Return the identities of a robot at *host*, a name or numeric address: one for each address that *host* has here.

    Loopback and link-local addresses are of node *node_rank*, which uses *host*; others are of the cluster. Give *port*
    if *host* may have other robots at other ports. *here* is False if this is another node, which resolves no name.
    A name without an address raises ConfigError with config path *path*, or is an identity of the node if it is not
    *required* to have one.
    """
    suffix = "" if port is None else f"{_PORT}{port}"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=0 if here else socket.AI_NUMERICHOST)
    except (OSError, UnicodeError) as error:  # UnicodeError: no domain name is like that
        if not required:
            return [Identity(host.lower().rstrip(".") + suffix, node_rank)]
        why = f"which has no address here ({error.args[-1]})" if here else f"but node {node_rank} drives the robot"
        raise ConfigError(f"is the name {host!r}, {why}: give the numeric address", path=path) from None
    identities: dict[Identity, None] = {}
    for *_, sockaddr in found:
        address = ipaddress.ip_address(sockaddr[0])
        address = getattr(address, "ipv4_mapped", None) or address
        own = address.is_loopback or address.is_unspecified
        rank = node_rank if own or address.is_link_local else None
        identities[Identity((_LOOPBACK if own else str(address)) + suffix, rank)] = None
    return list(identities)


def device_identity(path: str, node_rank: int) -> Identity:
    """Return the identity of a robot at a device file of this node, which *path* may be a link to."""
    return Identity(os.path.realpath(path), node_rank)


def identities_of(info: HardwareInfo) -> list[Identity]:
    """Return the identities that `enumerate` has set, else one of `HardwareInfo.identity`; [] if there is neither."""
    return list(info.identities) or [Identity(f"{info.type}:{name}") for name in [str(info.identity)] if name]


def on_its_host(identity: Identity, ranks: Mapping[str, int], homes: Mapping[int, int]) -> Identity:
    """Return *identity* as all nodes of its host have it.

    *ranks* maps the own addresses of nodes to their ranks: such an address is that node's loopback. *homes* maps the
    rank of each node to the lowest rank on its host.
    """
    host, *port = identity.name.partition(_PORT)
    rank = ranks.get(host) if identity.node_rank is None else identity.node_rank
    if rank is None:
        return identity
    name = identity.name if identity.node_rank is not None else _LOOPBACK + "".join(port)
    return Identity(name, homes.get(rank, rank))
