"""Free TCP ports."""

from __future__ import annotations

import socket


def free_port(below: int | None = None) -> int:
    """A TCP port that nothing listens on now, *below* a number if given. Nothing keeps it free.

    Raises:
        OSError: there is none below that number.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    if below is None or port < below:
        return port
    for port in range(below - 1, 1023, -1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no TCP port below {below} is free")
