"""How this agentd's sockets are protected."""

from __future__ import annotations

from agentd.config import Config
from rlinf_actors.net.address import endpoint_of
from rlinf_actors.net.security import Security
from rlinf_actors.settings import Settings


def security_of(config: Config, settings: Settings) -> Security:
    """What agentd may do with the key that it has, or without one.

    Raises:
        ConfigError: there is a key file that cannot be used.
    """
    if config.embedded:  # unix sockets only
        return Security(config.insecure)
    from rlinf_actors.security import own

    role = "head" if config.head else "agent"
    return Security.of(own.find(settings, role, given=config.key_file, head=config.head_key), config.insecure)


def check_addresses(config: Config, security: Security) -> None:
    """Refuse addresses that nothing protects, before anything is started.

    Raises:
        ConfigError: there is one.
    """
    if config.listen is not None:
        security.check(endpoint_of(config.listen, "--listen"), "listen on")
    if config.connect is not None and not config.connect.startswith("ipc://"):
        security.check(endpoint_of(config.connect, "--connect"), "connect to")
