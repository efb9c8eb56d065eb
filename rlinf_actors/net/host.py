"""Identity and addresses of this host, and TCP ports that are reserved for later listeners."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import re
import socket
from pathlib import Path

from rlinf_actors import procfs
from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.exhaustion import explain


def host_key(user: int | None = None) -> str:
    """Return a short key of this host for processes of the user with uid *user*, None for this process's user. Two
    processes with equal keys can use each other's unix sockets and pids.

    The key is a hash of the boot id, the network and pid namespaces, and the user.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return hashlib.sha256(f"{boot} {spaces} {os.getuid() if user is None else user}".encode()).hexdigest()[:16]


def pid_start(pid: int) -> int:
    """Return when the process *pid* started, in clock ticks since boot; 0 if it has ended.

    Pids are reused, so only pid and start time together identify a process.
    """
    found = procfs.stat(pid)
    return 0 if found is None or found.ended else found.started


def route_ip(host: str) -> str:
    """Return the IP address from which this machine's packets to *host* (an address or a name) are sent. Sends nothing.

    Raises:
        OSError: the name has no address, or there is no route to it.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"{host} has no address")


def free_port(below: int | None = None) -> int:
    """Return a TCP port that is free now, without reserving it.

    *below* asks for the highest free port below that number; None lets the kernel choose any.

    Raises:
        OSError: no port is free.
    """
    for port in (0,) if below is None else range(below - 1, 1023, -1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no TCP port below {below} is free")


class HeldPorts:
    """Reserves TCP ports of this machine for servers that start later.

    A reserved port is bound on every address, but not listened on, until `release` or `close`. The kernel gives a bound
    port neither to a socket that asks for any port nor to an outgoing connection. A server that asks for this port gets
    it if it sets SO_REUSEADDR or SO_REUSEPORT, because the socket that is bound here sets both. asyncio, http.server,
    ZeroMQ, TCPStore and gRPC set one of them. Other servers can bind only after `release`.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def hold(self, largest: int | None = None) -> int:
        """Reserve a port that is free on every address of this machine, and return its number.

        Args:
            largest: largest port that will do; None for any.

        Raises:
            OSError: there is no free port; the text says what to do.
        """
        try:
            held = _bound()
        except OSError as error:
            raise OSError(error.errno, explain(error)) from None
        if largest is not None and held.getsockname()[1] > largest:
            held.close()
            held = _bound_up_to(largest)
        port: int = held.getsockname()[1]
        self._held[port] = held
        return port

    def release(self, port: int) -> None:
        held = self._held.pop(port, None)
        if held is None:
            raise UsageError(f"port {port} is not held here; held: {', '.join(map(str, self._held)) or 'none'}")
        held.close()

    def close(self) -> None:
        for port in list(self._held):
            self.release(port)


def _bound_up_to(largest: int) -> socket.socket:
    """Return a socket that is bound to the highest free port up to *largest*."""
    for port in range(min(largest, 65535), 1023, -1):
        try:
            return _bound(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"no TCP port from 1024 to {largest} is free")


def _bound(port: int = 0) -> socket.socket:
    try:
        return _bind(socket.AF_INET6, "::", port)  # which covers IPv4 too
    except OSError as error:
        if port and error.errno == errno.EADDRINUSE:
            raise
        return _bind(socket.AF_INET, "0.0.0.0", port)  # no IPv6 here


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if port:  # before the options: with them it succeeds although another process of this user holds the port
            held.bind((address, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if not port:
            held.bind((address, 0))
    except OSError:
        held.close()
        raise
    return held


DEFAULT_LISTEN = "127.0.0.1:6380"


def split_address(address: str, path: str) -> tuple[str, int]:
    """Return host and port of an address of the form ``HOST:PORT``.

    An IPv6 host is written ``[HOST]:PORT``. A leading ``tcp://`` is ignored.

    Raises:
        ConfigError: *address* has another form. The error names *path*: the option, variable or file that has the
            address.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,9}", port) or int(port) > 65535 or "/" in host:
        raise ConfigError(f"is {address!r}; it must be HOST:PORT, such as {DEFAULT_LISTEN}", path=path)
    return host.strip("[]"), int(port)


def joined_address(host: str, port: int | str) -> str:
    """Return the address of *host* and *port*, which `split_address` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def has_name(endpoint: str) -> bool:
    """Return True if a ZeroMQ endpoint names its host, instead of an address."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(";")[2].rpartition(":")[0]  # after the address to connect from
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return False


def endpoint_of(address: str, path: str) -> str:
    """Return the ZeroMQ endpoint for an address: ``tcp://HOST:PORT`` for ``HOST:PORT``; an endpoint stays as it is.

    Raises:
        ConfigError: *address* has another form. The error names *path*: the option, variable or file that has the
            address.
    """
    if address.startswith("ipc://"):
        return address
    host, port = split_address(address, path)
    if host == "localhost":
        host = "127.0.0.1"  # ZeroMQ binds to addresses, not to names
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
