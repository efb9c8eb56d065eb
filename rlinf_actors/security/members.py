"""Members of a cluster: names, public keys, roles, and the table of which role may send which control message. Pure.

Every control message has an entry in the table, under its tag; in place of AskNode, each question in it has one. The
head checks in addition what a message claims about its sender (a node, a namespace, a group): `head.authority`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import msgspec

from rlinf_actors.errors import ConfigError

Role = Literal["local", "head", "agent", "driver", "worker", "viewer", "enroll"]
"""The role of a member, from its key.

`local` has no key: only this user can reach its socket (ipc in a directory of mode 0700, or loopback of a cluster
without keys). `head` is the administrator, who holds the head's own key pair. `viewer` sees all jobs, and changes
nothing: a program that shows the cluster, such as `rlinf-actors serve`. `enroll` is a join token that was not used
yet."""


class Member(msgspec.Struct, frozen=True):
    """A process that has proved by its key who it is, or a local process, which needs no key.

    Attributes:
        role: decides which messages the member may send.
        name: the name under which a node or driver was enrolled; the namespace of a worker.
        job: the namespace of a worker, "" for the other roles.
        key: the member's public key, "" for `local`.
        user: the user that the key of an agent was enrolled for, "" if the key is not limited to a user.
    """

    role: Role
    name: str = ""
    job: str = ""
    key: str = ""
    user: str = ""

    def is_same(self, other: Member) -> bool:
        """Return True if *other* is the same member. The two may have proved this by different keys."""
        return (self.role, self.name, self.job, self.user) == (other.role, other.name, other.job, other.user)

    def __str__(self) -> str:
        if self.role == "local":
            return "a local process"
        if self.role == "head":
            return "the head's own key"
        if self.role == "worker":
            return f"a worker of job {self.job!r}"
        return f"{self.role} {self.name!r}{f' of user {self.user!r}' if self.user else ''}"


LOCAL = Member("local", "local")
"""The member for a peer on a socket that needs no key."""

_HEAD = frozenset({"head"})
_AGENT = frozenset({"agent"})
_CLIENTS = frozenset({"driver", "worker"})
_DRIVER = frozenset({"driver"})
_PEERS = frozenset({"head", "agent", "driver", "worker"})
_VIEWER = frozenset({"viewer"})
_ENROLL = frozenset({"enroll"})

VERBS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        # sessions
        "AgentHello": _AGENT,
        "ClientHello": _CLIENTS,
        "Welcome": _HEAD,
        "Goodbye": _PEERS,
        "Beat": _PEERS,
        # a client and its groups
        "GetNodes": _CLIENTS,
        "Nodes": _HEAD,
        "Launch": _CLIENTS,
        "Launched": _HEAD,
        "FindGroup": _CLIENTS,
        "Handles": _CLIENTS,
        "Detach": _CLIENTS,
        "StopGroup": _CLIENTS,
        "LaunchPart": _CLIENTS,
        "FindWorker": _CLIENTS,
        "FoundWorker": _HEAD,
        "AddRanks": _CLIENTS,
        "ResizeGroup": _CLIENTS,
        "WatchClients": _CLIENTS,
        "LogCredit": _DRIVER | _HEAD,
        "FlushLogs": _DRIVER | _HEAD,
        "Flushing": _HEAD,
        # looking; everybody sees the nodes, and of the jobs its own (head.authority)
        "GetStatus": _PEERS | _VIEWER,
        "Status": _HEAD,
        "GetEvents": _CLIENTS | _HEAD | _VIEWER,
        "Events": _HEAD,
        "EnumerateHardware": _CLIENTS | _HEAD,
        "Enumerated": _HEAD,
        # questions to nodes (wire.node_questions): the verb is that of the question in an AskNode
        "ReadTrace": _DRIVER | _HEAD,  # a driver those of its own jobs
        "SwitchTrace": _DRIVER | _HEAD,  # a driver those of its own jobs
        "ReadLogs": _DRIVER | _HEAD | _VIEWER,  # a driver those of its own jobs
        "ReadStacks": _DRIVER | _HEAD | _VIEWER,  # a driver those of its own jobs
        "AttachDebugger": _DRIVER | _HEAD,  # it runs code: a driver in its own jobs, and no viewer
        "ReadFigures": _DRIVER | _HEAD | _VIEWER,  # a driver those of its own jobs
        "CheckNode": _DRIVER | _HEAD | _VIEWER,  # a viewer facts only
        "NodeAnswered": _HEAD,
        # running the cluster
        "EStop": _PEERS,  # whoever sees danger, but a viewer; only a driver or the head may release it
        "EStopped": _HEAD,
        "EndGroup": _DRIVER | _HEAD,  # a driver those of its own jobs
        "KillWorker": _DRIVER | _HEAD,  # a driver those of its own jobs
        "WorkerKilled": _HEAD,
        "DrainNode": _AGENT | _HEAD,  # an agent its own node
        "Drained": _HEAD,
        "StopCluster": _DRIVER | _HEAD,  # of its own cluster: the head refuses any other
        "Done": _HEAD,
        # an agent and its node
        "StartWorkers": _HEAD,
        "StopWorkers": _HEAD,
        "LookForHardware": _HEAD,
        "HardwareFound": _AGENT,
        "StopLooking": _HEAD,
        "AskAgent": _HEAD,
        "AgentAnswered": _AGENT | _DRIVER,  # a driver about itself
        "Watch": _HEAD,
        "Unwatch": _HEAD,
        "ProcessGone": _AGENT,
        "WorkerReady": _AGENT,
        "WorkerExited": _AGENT,
        "LeaseEnded": _AGENT,
        "WorkersHealth": _AGENT,
        "OutputLost": _AGENT,
        "LogLines": _AGENT | _HEAD,
        # the head to clients
        "WorkerChanged": _HEAD,
        "ClientGone": _HEAD,
        "Warn": _HEAD,
        # keys
        "Enroll": _ENROLL,
        "RotateKey": _AGENT | _DRIVER,
        "Enrolled": _HEAD,
        "AddKey": _HEAD,
        "RevokeKey": _HEAD,
        "GetKeys": _HEAD,
        "Keys": _HEAD,
    }
)
"""The roles that may send each control message, by its verb (wire.node_questions). `local` may send every message."""


def may(member: Member, verb: str) -> bool:
    """Return True if *member* may send the control message that has this *verb*. No member may send an unknown verb."""
    roles = VERBS.get(verb)
    return roles is not None and (member.role == "local" or member.role in roles)


class Gate(Protocol):
    """Decides for a listener which keys are admitted, and records rejected connections."""

    def admit(self, public_key: str) -> Member | None:
        """Return the member that holds this key, None if the key is not admitted. Any thread.

        Called for every frame, so it must be cheap.
        """

    def refused(self, public_key: str, address: str, why: str = "", times: int = 1) -> None:
        """Record that connections were rejected. Loop thread.

        Args:
            public_key: the key of the connections; "" if their handshake failed before a key was known.
            address: the IP address that they came from, "" if unknown.
            why: the reason; "" if `admit` rejected the key.
            times: number of the connections.
        """


KEY_CHARS = 40
"""Length of a key of 32 bytes as Z85 text (ZeroMQ RFC 32)."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@$\\-]{0,99}")
USER_RULE = "the name of a user has 1 to 100 letters, digits, '.', '_', '@', '$', '\\' and '-'"
NAME_RULE = "a name has 1 to 100 letters, digits, '.', '_', '@' and '-', the first a letter or digit"


def is_key(text: str) -> bool:
    """Return True if *text* has the form of a public or secret key: eight Z85 groups of four bytes each."""
    if _Z85.fullmatch(text) is None:
        return False
    groups = (text[at : at + 5] for at in range(0, KEY_CHARS, 5))
    return all(functools.reduce(lambda sum, char: sum * 85 + _DIGITS.index(char), group, 0) < 2**32 for group in groups)


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_user(text: str) -> bool:
    return _USER.fullmatch(text) is not None


def check_public(public: str, path: str) -> None:
    """Raise ConfigError if *public* is not a public key. *path* is the file, option or variable that has it, for the
    error.
    """
    if not is_key(public):
        raise ConfigError(f"is {public[:60]!r}; a public key has {KEY_CHARS} characters of Z85", path=path)


def check_name(name: str, path: str) -> None:
    """Raise ConfigError if *name* is not allowed for a node or driver. *path* is the file or option that has it, for
    the error.
    """
    if not is_name(name):
        raise ConfigError(f"is {name[:100]!r}; {NAME_RULE}", path=path)


def fingerprint(public: str) -> str:
    """Return the first characters of a public key, by which people tell keys apart."""
    return public[:8]
