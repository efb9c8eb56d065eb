"""This agentd's key, and what it means for its sockets and its name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentd.config import Config
from rlinf_actors.net.address import endpoint_of
from rlinf_actors.net.security import Security, key_at
from rlinf_actors.settings import Settings

if TYPE_CHECKING:  # loads zmq
    from rlinf_actors.security.keyfile import KeyFile


def own_key(config: Config, settings: Settings) -> KeyFile | None:
    """The key file of this agentd, None without one; this user's own on loopback where nobody has made keys.

    Raises:
        ConfigError: there is one that cannot be used.
    """
    if config.embedded:  # unix sockets only
        return None
    role = "head" if config.head else "agent"
    return key_at(
        _endpoint(config), settings, role, insecure=config.insecure, given=config.key_file, head=config.head_key
    )


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
    endpoint = _endpoint(config)
    if endpoint:
        security.check(endpoint, "listen on" if config.head else "connect to")


def _endpoint(config: Config) -> str:
    """Of the head, here or elsewhere; "" without TCP."""
    if config.head:
        return endpoint_of(config.listen, "--listen") if config.listen is not None else ""
    if config.connect is None or config.connect.startswith("ipc://"):
        return ""
    return endpoint_of(config.connect, "--connect")
