"""Who may listen where: the one place that decides, for every socket of this project.

Two modes: ipc in a directory of mode 0700, and TCP. Keys come with TCP's mode; until a cluster has
them, TCP is for loopback, unless a test asks for more by an explicit flag.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import INSECURE_TEST_NETWORK


@dataclass(frozen=True)
class Security:
    """The settings that every socket gets.

    Attributes:
        insecure_test_network: allow TCP outside loopback without keys (network namespaces of tests).
    """

    insecure_test_network: bool = False

    def check(self, endpoint: str, verb: str) -> None:
        """Refuse an endpoint that these settings do not protect; *verb* is "listen on" or "connect to".

        Raises:
            ConfigError: the endpoint leaves this machine and there are no keys.
        """
        if endpoint.startswith(("ipc://", "inproc://")) or self.insecure_test_network:
            return
        host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if not is_loopback(host):
            raise ConfigError(
                f"refusing to {verb} {endpoint}: it is outside loopback and this cluster has no keys. "
                f"Use 127.0.0.1, or, in a closed test network only, pass --insecure-test-network to agentd "
                f"and set {INSECURE_TEST_NETWORK}=1 for drivers"
            )


def is_loopback(host: str) -> bool:
    """Whether *host* (an address or ``localhost``) stays on this machine. Names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
