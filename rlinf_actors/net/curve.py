"""CURVE on ZeroMQ sockets: the options that protect them, and what their monitors report of handshakes.

`net.socket_security` decides how a socket is protected. libzmq copies a socket's options when it binds or connects, so
an option counts for the endpoints that follow. One listener can bind a unix socket first and TCP with CURVE afterwards,
but not in the other order: a ZAP domain stays set.

`rlinf-actors estop` imports this module: no asyncio, click, logging or rich here.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

from rlinf_actors.net.socket_security import Mechanism, Proof
from rlinf_actors.security.members import fingerprint

if TYPE_CHECKING:
    from rlinf_actors.security.keypair import KeyPair

HANDSHAKE_S = 5
"""Seconds that libzmq gives a new connection to a listener to authenticate (its own default is 30). For that long an
unauthenticated peer occupies a descriptor and the memory of a message."""
LISTENER_S = 30
"""Seconds that a connecting process gives the listener for the handshake. It is longer, because its time counts from
the moment when the kernel has connected. If thousands of agents come at once, their connections wait there until libzmq
accepts them, and a connection that gives up makes the others wait for nothing."""


def before_bind(socket: zmq.Socket[bytes], mechanism: Mechanism, pair: KeyPair | None, domain: str) -> None:
    """Set the options that protect the endpoint to which *socket* is bound next.

    Args:
        socket: a listener's ZeroMQ socket.
        mechanism: how connections to the endpoint are protected.
        pair: the listener's keys; CURVE needs them.
        domain: the ZAP domain whose gate decides which keys CURVE admits.
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    if mechanism is Mechanism.IPC:
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # beside the directory's mode
        socket.setsockopt(zmq.IPC_FILTER_UID, 0)  # root's emergency stop reaches the clusters of every user
    if mechanism is Mechanism.CURVE:
        assert pair is not None
        # first, and fatal if it cannot be set: libzmq admits every peer to a domain that it does not enforce
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    elif socket.getsockopt(zmq.ZAP_DOMAIN):
        raise ValueError("bind unix sockets before TCP ones: this one would ask for keys too")


def before_connect(socket: zmq.Socket[bytes], proof: Proof) -> None:
    """Set the options for the next connection of *socket*: prove this process's key pair, and
    require the server's key.
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(LISTENER_S * 1000))
    socket.setsockopt(zmq.CURVE_SERVERKEY, proof.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, proof.pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, proof.pair.secret.encode())


# --- events of a socket's monitor ---
# They name neither the peer nor its key (that is in a draft of libzmq), only what went wrong.

FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
FAILED_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
CONNECTED = int(zmq.EVENT_CONNECTED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
NO_ZEROMQ = "what listens there does not speak as a head does"
"""The reason for a disconnection before any event of a handshake; libzmq does not reconnect after that."""
_EVENT = struct.Struct("=Hi")  # of a monitor's first frame, in the machine's byte order: event and value
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_REASONS = {
    _MISMATCH: "it came without a key",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "it expected a server with another key than this one's",
}


def read_event(frames: Sequence[bytes]) -> tuple[int, int]:
    """Return the event's number and value from a message of a socket's monitor."""
    event, value = _EVENT.unpack(frames[0])
    return int(event), int(value)


def why_rejected(value: int) -> str:
    """Return, for people, why a CURVE server rejected a connection.

    *value* is the value of the FAILED_PROTOCOL event that the server's monitor reported.
    """
    return _REASONS.get(value, "its handshake was malformed")


def unanswered(event: int, value: int) -> bool:
    """Return True if a handshake failed only because the server is stopped or busy and did not answer in time."""
    return event == int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL) and value not in (errno.EPIPE, errno.ECONNRESET)


def why_refused(event: int, value: int, key: str) -> tuple[str, bool]:
    """Explain to a client why its handshake with a server failed.

    Args:
        event: number of the event that the client's monitor reported.
        value: value of that event.
        key: the client's public key, "" if it has none.

    Returns:
        The reason, for people; and True if libzmq will not try to connect again.
    """
    if event == int(zmq.EVENT_HANDSHAKE_FAILED_AUTH):
        return (
            f"this process's key ({fingerprint(key)}) is not admitted there: it is not listed, or revoked, or has "
            "expired (`rlinf-actors keys list --all` on the head's machine)",
            True,
        )
    mismatch = event == FAILED_PROTOCOL and value == _MISMATCH
    if not key:  # either end may see the mismatch first, and close
        return "what listens there wants a key, and this process has none (`rlinf-actors keys enroll`)", mismatch
    if mismatch:
        return "what listens there takes no keys, and this process insists on them", True
    return (
        "what listens there does not have the key that is expected of it: it is the head of another user or cluster, "
        "or has a new key (`rlinf-actors keys trust`). (On loopback this user's own key is expected, unless head.key "
        "is beside it or RLINF_ACTORS_KEYS names another directory of keys. Or it has too many connections, see "
        "`rlinf-actors events --kind refused`)",
        False,
    )
