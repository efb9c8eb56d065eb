"""The service manager's notification protocol: a datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


class Notifier:
    """Tells systemd how the daemon is; does nothing where there is none. Takes the variable away from workers."""

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def say(self, **fields: str | int) -> None:
        """Send fields, e.g. ``say(READY=1, STATUS="head tcp://...")``. A manager that is gone is logged only."""
        if not self._address:
            return
        lines = "\n".join(
            f"{name}={str(value).splitlines()[0] if value != '' else ''}" for name, value in fields.items()
        )
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.connect(self._address)
                channel.send(lines.encode())
        except OSError as error:
            log.warning("cannot notify the service manager at %s: %s", self._address, error)
