"""The socket options that make up what net.security has decided.

libzmq copies a socket's options when it binds or connects: whatever is set here counts for what is bound next, and one
socket can listen on a unix socket and then, with CURVE, on TCP. Not the other way round: what has a domain keeps it.
"""

from __future__ import annotations

import os

import zmq

from rlinf_actors.net.security import Mechanism, Proof
from rlinf_actors.security.keypair import KeyPair

HANDSHAKE_S = 5
"""How long a new connection may take until it has proved itself (libzmq's default is 30 s): a stranger who says
nothing holds a descriptor that long, and one who says much holds memory. libzmq has no limit of connections; see
docs/security.md."""


def before_bind(socket: zmq.Socket[bytes], mechanism: Mechanism, pair: KeyPair | None, domain: str) -> None:
    """Protect the endpoint that is bound next.

    Args:
        socket: the listener.
        mechanism: how.
        pair: of the listener, for CURVE.
        domain: of ZAP, where a handler decides about every connection.
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    if mechanism is Mechanism.IPC:
        socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # beside the directory's mode
        socket.setsockopt(zmq.IPC_FILTER_UID, 0)  # root's emergency stop reaches the clusters of every user
    if mechanism is Mechanism.CURVE:
        assert pair is not None
        # first, and fatal where it cannot be set: a domain that nobody enforces lets everybody in without a handler
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
    elif socket.getsockopt(zmq.ZAP_DOMAIN):
        raise ValueError("bind unix sockets before TCP ones: this one would ask for keys too")


def before_connect(socket: zmq.Socket[bytes], proof: Proof) -> None:
    """Have the next connection prove who it is, and insist on its server's key."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.CURVE_SERVERKEY, proof.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, proof.pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, proof.pair.secret.encode())
