"""Read network interfaces and their IPv4 addresses from the kernel, without psutil (40 ms to import)."""

from __future__ import annotations

import array
import fcntl
import logging
import socket
import struct
from collections.abc import Iterator

log = logging.getLogger(__name__)

_SIOCGIFCONF = 0x8912
"""linux/sockios.h: all IPv4 addresses, each with its interface."""
_IFREQ_SIZE = 16 + struct.calcsize("P") * 3
"""Bytes of a struct ifreq: 16 for the name, then a union; its largest member, struct ifmap, takes three longs."""
_IFCONF = struct.Struct("iP")
"""struct ifconf: size and address of the buffer for ifreqs."""


def ipv4_interfaces() -> dict[str, str]:
    """Return a mapping of each network interface of this machine to its first IPv4 address.

    Interfaces without an IPv4 address are left out. If the kernel refuses to list addresses, as some sandboxes do, the
    mapping is empty and a warning is logged.
    """
    first = dict(reversed(list(_addresses())))
    return {name: first[name] for _, name in socket.if_nameindex() if name in first}


def interface_of(ip: str) -> str:
    """Return the name of the interface that has the IPv4 address *ip*; "" if no interface has it."""
    return next((label.partition(":")[0] for label, found in _addresses() if found == ip), "")


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield a pair for each IPv4 address of this machine: its label and the address.

    The label is the name of the address's interface, or an alias such as "eth0:1".
    """
    try:
        yield from _ifreqs()
    except OSError as error:
        log.warning(
            "the kernel does not list this machine's network addresses (%s), so none is chosen for collectives; "
            "set RLINF_COMM_NET_DEVICES if they must use a certain one",
            error,
        )


def _ifreqs() -> Iterator[tuple[str, str]]:
    size = _IFREQ_SIZE * 64
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        while True:
            room = array.array("B", bytes(size))
            filled = _IFCONF.unpack(fcntl.ioctl(asker, _SIOCGIFCONF, _IFCONF.pack(size, room.buffer_info()[0])))[0]
            if filled < size:  # the kernel fills what fits, and does not say that there is more
                break
            size *= 2
    for start in range(0, filled, _IFREQ_SIZE):
        entry = room[start : start + _IFREQ_SIZE].tobytes()
        yield entry[:16].split(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])
