"""Enrolment of this machine at a head, by a join token: `rlinf-actors keys join` and `agentd --token` call `join`.

`join` may be called again with the same token after any failure. The new key is written to a file beside its final
place before the head is asked, because the head may list it although its answer is lost. The next call tries the same
key.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from rlinf_actors.errors import (
    AuthenticationError,
    ClusterTimeoutError,
    ConfigError,
    ProtocolError,
    UsageError,
)
from rlinf_actors.net.host import endpoint_of
from rlinf_actors.net.link import secret_identity
from rlinf_actors.net.rpc import ControlClient, KeyRefusedError
from rlinf_actors.net.socket_security import Security
from rlinf_actors.security import keyfile
from rlinf_actors.security.job import PATH, JoinToken
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.wire.client_messages import GetStatus
from rlinf_actors.wire.control_codec import Body
from rlinf_actors.wire.key_messages import Enroll, Enrolled, KeyRole
from rlinf_actors.wire.protocol import expected

WAIT_S = 30.0
"""Seconds to wait for the head, which may be busy or starting."""
PATIENT_S = 5.0
"""Seconds after which the user is told that the head is being waited for."""
PENDING = ".joining"


class Joined(msgspec.Struct, frozen=True):
    """The result of `join`: the key file of this machine, and a warning of the head, "" for none."""

    key: KeyFile
    warning: str = ""


def join(
    token: JoinToken,
    folder: Path,
    note: Callable[[str], object],
    *,
    address: str | None = None,
    node_id: str = "",
    user: str = "",
) -> Joined:
    """Make a key for this machine in *folder*, and list it at the head by the join token *token*. Blocks.

    If an earlier call with the token has listed a key, return that key.

    Args:
        token: the join token.
        folder: the key directory.
        note: called with lines for the user.
        address: HOST:PORT of the head, None for the address in the token.
        node_id: id of this node, "" to choose one. It is written into the key file.
        user: the user that the key is for, "" if the head is not to limit it to a user.

    Raises:
        UsageError: the folder has another member's key; or the token is for another node or user.
        AuthenticationError: the head refused the token, and lists no key that an earlier call has made.
        ClusterTimeoutError: the head did not answer. The same call may be tried again.
        ConfigError: a file of the folder cannot be used.
    """
    endpoint = endpoint_of(address or token.address, "--connect" if address else PATH)
    path = keyfile.path_of(folder, token.role)
    there = _of(path, token)
    pending = path.with_name(path.name + PENDING)
    at = endpoint.removeprefix("tcp://")
    key, is_new = _pending(pending, token, node_id, at)
    try:
        answer = _enroll(endpoint, token, key, user, note)
        if answer is None:  # the head has ended this key meanwhile
            pending.unlink(missing_ok=True)
            key, is_new = _pending(pending, token, node_id, at)
            answer = _enroll(endpoint, token, key, user, note)
    except KeyRefusedError:
        earlier = [one for one in (None if is_new else key, there) if one is not None]
        listed = next((one for one in earlier if _is_listed(endpoint, one, note)), None)
        if listed is None:
            pending.unlink(missing_ok=True)
            raise AuthenticationError(_refused(token, endpoint)) from None
        note("the head lists the key of this machine already, by an earlier use of this token")
        if listed is there:
            pending.unlink(missing_ok=True)
            return Joined(there)
        key, answer = listed, Enrolled(_role(token), token.name)
    except (AuthenticationError, ConfigError, UsageError):
        pending.unlink(missing_ok=True)  # the head has certainly not listed the key
        raise
    except ClusterTimeoutError as error:
        raise ClusterTimeoutError(f"{error} Try again with the same token") from None
    if answer is None:
        raise ProtocolError(f"the head at {endpoint} knows each key that this machine makes")
    with contextlib.suppress(FileNotFoundError):  # another call with this token has done it
        pending.replace(path)
    return Joined(keyfile.load(path), answer.warning)


def _role(token: JoinToken) -> KeyRole:
    return "driver" if token.role == "driver" else "viewer" if token.role == "viewer" else "agent"


def _of(path: Path, token: JoinToken) -> KeyFile | None:
    """Return the key file at *path* if it is of the member that the token is for; None if there is none."""
    if not path.exists():
        return None
    there = keyfile.load(path)
    if (there.role, there.name, there.head) == (token.role, token.name, token.head):
        return there
    whose = f"the key of {there.role} {there.name!r}" + ("" if there.head == token.head else " of another head")
    raise UsageError(
        f"{path} is there already, {whose}, and this token is for {token.role} {token.name!r}: move that file away, or "
        "use another directory (RLINF_ACTORS_KEYS, --dir)"
    )


def _pending(pending: Path, token: JoinToken, node_id: str, address: str) -> tuple[KeyFile, bool]:
    """Return the key that an earlier call has left, else a new one, and whether it is new."""
    if pending.exists():
        left = keyfile.load(pending)
        same = (left.role, left.name, left.head) == (token.role, token.name, token.head)
        if same and node_id in ("", left.node):
            return left, False
        pending.unlink()
    node = (node_id or uuid.uuid4().hex[:12]) if token.role == "agent" else ""
    key = KeyFile(token.role, token.name, KeyPair.make(), token.head, node=node, address=address)
    try:
        keyfile.save_new(pending, key)
    except FileExistsError:
        return keyfile.load(pending), False
    return key, True


def _enroll(endpoint: str, token: JoinToken, key: KeyFile, user: str, note: Callable[[str], object]) -> Enrolled | None:
    """List *key* at the head by the token, and return the head's answer; None if the head knew the key before."""
    holder = KeyFile(token.role, token.name, token.pair, token.head)
    try:
        answer = _ask(endpoint, holder, Enroll(key.pair.public, key.node, user), note)
    except UsageError as error:
        if "is known already" in str(error):
            return None
        raise
    return expected(answer, Enrolled)


def _is_listed(endpoint: str, key: KeyFile, note: Callable[[str], object]) -> bool:
    """Return True if the head admits this key."""
    try:
        _ask(endpoint, key, GetStatus(""), note)
    except AuthenticationError:
        return False
    return True


def _ask(endpoint: str, key: KeyFile, question: Body, note: Callable[[str], object]) -> Body:
    async def ask() -> Body:
        from rlinf_actors.net.zmq_network import ZmqNetwork

        loop = asyncio.get_running_loop()
        network = ZmqNetwork(loop, Security.of(key))
        waits = loop.call_later(PATIENT_S, note, f"waiting for the head at {endpoint} for up to {WAIT_S:.0f} s ...")
        try:
            client = ControlClient(network, endpoint, secret_identity("joins"), lambda notice: None)
            try:
                return await client.request(question, WAIT_S, first=True)
            finally:
                client.close()
        finally:
            waits.cancel()
            network.close()

    return asyncio.run(ask())


def _refused(token: JoinToken, endpoint: str) -> str:
    option = "" if token.role == "agent" else f" --{token.role}"
    return (
        f"the head at {endpoint.removeprefix('tcp://')} refused this join token of {token.role} {token.name!r}: it was "
        "used already, has expired (15 minutes after it was made), or was revoked. Make another one there: "
        f"rlinf-actors keys enroll {token.name}{option}"
    )
