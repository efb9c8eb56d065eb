"""This agentd's key, and what it means for its sockets and its name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentd.config import Config
from rlinf_actors.net.address import endpoint_of
from rlinf_actors.net.security import Security
from rlinf_actors.settings import Settings

if TYPE_CHECKING:  # loads zmq
    from rlinf_actors.security.keyfile import KeyFile


def own_key(config: Config, settings: Settings) -> KeyFile | None:
    """The key file of this agentd, None without one.

    Raises:
        ConfigError: there is one that cannot be used.
    """
    if config.embedded:  # unix sockets only
        return None
    from rlinf_actors.security import own

    return own.find(settings, "head" if config.head else "agent", given=config.key_file, head=config.head_key)


def named(config: Config, key: KeyFile | None) -> Config:
    """The configuration with the node's name: an agent speaks for the node that its key was made for, unless its
    configuration names another one, which the head refuses then.
    """
    if key is None or key.role != "agent" or config.name is not None:
        return config
    return replace(config, name=key.name)


def check_addresses(config: Config, security: Security) -> None:
    """Refuse addresses that nothing protects, before anything is started.

    Raises:
        ConfigError: there is one.
    """
    if config.listen is not None:
        security.check(endpoint_of(config.listen, "--listen"), "listen on")
    if config.connect is not None and not config.connect.startswith("ipc://"):
        security.check(endpoint_of(config.connect, "--connect"), "connect to")
