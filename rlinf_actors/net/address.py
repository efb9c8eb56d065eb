"""HOST:PORT as people write it, and the ZeroMQ endpoint that it means. Pure."""

from __future__ import annotations

from rlinf_actors.errors import ConfigError

DEFAULT_LISTEN = "127.0.0.1:6380"


def split_address(address: str, path: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` (``[HOST]:PORT`` for IPv6, ``tcp://`` in front is fine).

    Args:
        address: what somebody wrote.
        path: where they wrote it, for the error.

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ConfigError(f"is {address!r}; it must be HOST:PORT, such as {DEFAULT_LISTEN}", path=path)
    return host.strip("[]"), int(port)


def endpoint_of(address: str, path: str) -> str:
    """The ZeroMQ endpoint of ``HOST:PORT``; an endpoint of ours (ipc, tcp) stays what it is.

    Raises:
        ConfigError: it is something else.
    """
    if address.startswith("ipc://"):
        return address
    host, port = split_address(address, path)
    if host == "localhost":
        host = "127.0.0.1"  # ZeroMQ binds to addresses, not to names
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
