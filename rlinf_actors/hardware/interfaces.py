"""Read network interfaces and their IPv4 addresses from the kernel, without psutil (40 ms to import)."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

_SIOCGIFCONF = 0x8912
"""linux/sockios.h: all IPv4 addresses, each with its interface."""
_SIOCGIFADDR = 0x8915
"""linux/sockios.h: the first IPv4 address of an interface."""
_IFREQ = struct.Struct("16s24x")
"""struct ifreq; on return, sockaddr_in's address is at bytes 20-23."""
_IFREQ_SIZE = 16 + struct.calcsize("P") * 3
"""Bytes of a struct ifreq: 16 for the name, then a union; its largest member, struct ifmap, takes three longs."""
_IFCONF = struct.Struct("iP")
"""struct ifconf: size and address of the buffer for ifreqs."""


def ipv4_interfaces() -> dict[str, str]:
    """Return the first IPv4 address of each network interface of this machine, by the interface's name."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asker, _SIOCGIFADDR, _IFREQ.pack(name.encode()))
            except OSError:  # the interface has no IPv4 address, or was removed since
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(ip: str) -> str:
    """Return the name of the interface that has the IPv4 address *ip*; "" if no interface has it."""
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
        if socket.inet_ntoa(entry[20:24]) == ip:
            return entry[:16].split(b"\0")[0].decode().partition(":")[0]  # "eth0:1" is an alias of eth0
    return ""
