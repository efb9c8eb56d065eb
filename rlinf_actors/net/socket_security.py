"""Decides how every ZeroMQ socket of this project is protected. `net.curve` sets the options for it.

| endpoint | protected by |
|---|---|
| ipc | its directory (0700), and the kernel's word that the peer is this user (`Mechanism.IPC`) |
| TCP, this process has a key | CURVE, and a gate for each key (`Mechanism.CURVE`) |
| TCP of a worker | CURVE, with the pair that its job's token gives |
| TCP on loopback, no keys of a head on this machine | CURVE, with this user's "local" key (`security.keyfile`) |
| other TCP, no key | refused; in a closed test network nothing protects TCP (`Mechanism.PLAIN`) |

`rlinf-actors estop` and every user's Worker import this module: no asyncio, click, logging, rich or zmq here.
"""

from __future__ import annotations

import enum
import ipaddress
import os
from typing import TYPE_CHECKING

import msgspec

from rlinf_actors.errors import ConfigError
from rlinf_actors.net.unix_sockets import check_place
from rlinf_actors.settings import INSECURE_TEST_NETWORK, Settings

if TYPE_CHECKING:
    from rlinf_actors.security.keyfile import KeyFile
    from rlinf_actors.security.keypair import KeyPair


class Mechanism(enum.Enum):
    IPC = "ipc"
    CURVE = "curve"
    PLAIN = "plain"


class Proof(msgspec.Struct, frozen=True):
    """The keys for a connection to a CURVE server.

    Attributes:
        pair: the key pair by which this process authenticates.
        server: the public key that the server must have.
    """

    pair: KeyPair
    server: str


class Security(msgspec.Struct, frozen=True):
    """The keys of one process, which decide how its sockets are protected.

    Attributes:
        insecure_test_network: True to allow TCP without keys (network namespaces of tests).
        pair: this process's key pair, None if it has none. Workers of one job have the same pair.
        head: the head's public key, "" if it has none.
    """

    insecure_test_network: bool = False
    pair: KeyPair | None = None
    head: str = ""

    @classmethod
    def of(cls, key: KeyFile | None, insecure_test_network: bool = False) -> Security:
        """Return the keys of a process with the key file *key*. If *key* is None, the process has no key."""
        return cls(insecure_test_network) if key is None else cls(insecure_test_network, key.pair, key.server)

    @classmethod
    def toward(cls, head: str, settings: Settings, *roles: str) -> Security:
        """Return the keys with which this process connects to a head: those of its key file for one of *roles*.

        *head* is the head's endpoint. *settings* may name the key file. A unix socket needs no keys.

        Raises:
            ConfigError: there is a key file that cannot be used.
        """
        insecure = settings.insecure_test_network
        return cls.of(key_at(head, settings, *roles, insecure=insecure), insecure) if is_tcp(head) else cls(insecure)

    @classmethod
    def of_worker(cls, token: str, head: str, endpoint: str, listen_ip: str) -> Security:
        """Return the keys of a worker, from values that its agentd has checked.

        Args:
            token: the token of the worker's job.
            head: the head's public key; "" in a private cluster, which has no TCP, and in a closed test network.
            endpoint: the head's endpoint.
            listen_ip: the address on which the worker listens, "" for none.
        """
        if not head:
            return cls(insecure_test_network=is_tcp(endpoint) or bool(listen_ip))
        from rlinf_actors.security.job import job_pair

        return cls(False, job_pair(token), head)

    def mechanism(self, endpoint: str, verb: str) -> Mechanism:
        """Return how a socket of this process that binds or connects to *endpoint* is protected.

        *verb* is "listen on" or "connect to", for the error.

        Raises:
            ConfigError: the endpoint is TCP and this process has no key.
        """
        if endpoint.startswith(("ipc://", "inproc://")):
            return Mechanism.IPC
        if self.pair is not None:
            return Mechanism.CURVE
        if self.insecure_test_network:
            return Mechanism.PLAIN
        fix = "Run `rlinf-actors keys init` on the head's machine"
        if verb != "listen on":
            fix += " and `rlinf-actors keys enroll` for this one"
        raise ConfigError(
            f"refusing to {verb} {endpoint}: it is outside loopback, and there is no key here. {fix}; "
            f"or use 127.0.0.1. In a closed test network only: --insecure-test-network for agentd, "
            f"{INSECURE_TEST_NETWORK}=1 for drivers"
        )

    def proof(self, endpoint: str, token: str = "", *, observes: bool = False) -> Proof | None:
        """Return the keys for a link to *endpoint*, None if the link needs none.

        Args:
            endpoint: where the link leads.
            token: the token of the job if that is a worker, "" if it is the head.
            observes: True if this process unpickles nothing that the head passes on, as commands. root may then connect
                to the heads of all users.

        Raises:
            ConfigError: the endpoint is TCP and this process has no key; or a unix socket where another user's program
                could pose as the head.
        """
        if not token:
            if endpoint.startswith("ipc://") and not (observes and os.geteuid() == 0):
                check_place(endpoint.removeprefix("ipc://"))
            curve = self.mechanism(endpoint, "connect to") is Mechanism.CURVE
            return Proof(self.pair, self.head) if curve and self.pair is not None else None
        if endpoint.startswith(("ipc://", "inproc://")) or (self.insecure_test_network and self.pair is None):
            return None
        from rlinf_actors.security.job import job_pair

        job = job_pair(token)  # also for a member without a key of its own, which reached the head by a unix socket
        return Proof(job, job.public)


def key_at(
    endpoint: str,
    settings: Settings,
    *roles: str,
    insecure: bool,
    given: str | None = None,
    head: str | None = None,
) -> KeyFile | None:
    """Return the key file of a process that listens on a head's endpoint or connects to it; None if the process has
    none.

    On loopback without a key file and without *insecure*, this is the user's "local" key file, which is made if
    missing.

    Args:
        endpoint: the head's endpoint.
        settings: the settings of this process. They may name the key file.
        roles: the roles that this process may have, in order of preference.
        insecure: True if TCP needs no key.
        given: the path of the key file from the configuration, None to search for the file.
        head: the head's public key from the configuration, None to use the one in the file.

    Raises:
        ConfigError: there is a key file that cannot be used.
    """
    from rlinf_actors.security import keyfile

    loopback = is_tcp(endpoint) and is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
    found = keyfile.find(settings, *roles, given=given, head=head, loopback=loopback)
    if found is not None or insecure or not loopback:
        return found
    return keyfile.key(settings)


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def is_loopback(host: str) -> bool:
    """Return True if *host* is ``localhost`` or a loopback address. Other names are not resolved and give False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
