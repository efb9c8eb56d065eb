"""Whom `rlinf-actors keys` asks: a head that runs, as administrator or member, or the state of one that does not."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Union

from rlinf_actors.cli.output import note
from rlinf_actors.cli.queries import TIMEOUT_S, expected, find_head, observing
from rlinf_actors.errors import AuthenticationError, ConfigError, UsageError
from rlinf_actors.head.commands import Change, Command, LogEvent, Persist, Refusal
from rlinf_actors.head.key_registry import KeyRegistry
from rlinf_actors.head.store import FILE, HeadStore, own_keys
from rlinf_actors.net.discovery import client_settings
from rlinf_actors.net.host import endpoint_of, split_address
from rlinf_actors.net.rpc import ControlClient, KeyRefusedError, refusal
from rlinf_actors.net.socket_security import Security
from rlinf_actors.security.job import PATH, JoinToken
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keyfile import find as find_key
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import AddKey, Enroll, Enrolled, GetKeys, Keys, KeyState, RevokeKey, RotateKey
from rlinf_actors.wire.control_codec import Body, Failed

Question = Union[AddKey, GetKeys, RevokeKey]
WILDCARDS = ("0.0.0.0", "::", "*")


def administer(head: str | None, state_dir: str | None, question: Question) -> Keys:
    """What the administrator asks of a head. Blocks.

    Args:
        head: the option's value.
        state_dir: of a head that is not running; None to ask one that is.
        question: what is asked.

    Raises:
        ConfigError: no head runs here and no state is named, or the state is in use or no state.
        RlinfActorsError: it was refused; as cli.session.fetch_status.
    """
    settings = client_settings()
    if state_dir is not None:
        if head is not None:
            raise UsageError(
                "--head asks a head that runs, --state-dir changes what one will know that does not: say one"
            )
        note(f"no head is asked: this is what the head with state in {state_dir} will know when it starts")
        return asyncio.run(_offline(state_dir, settings, question))
    try:
        endpoint = find_head(head, settings)
    except ConfigError as error:
        raise ConfigError(f"{error}. Of a head that is not running, name the state by --state-dir") from None
    return asyncio.run(_online(endpoint, settings, question))


def as_holder(token: JoinToken, question: Enroll) -> Enrolled:
    """What the holder of a join token says to the head. Blocks.

    Raises:
        AuthenticationError: the token is not good (any more), or the head has another key.
        ClusterTimeoutError: no answer.
    """
    key = KeyFile(token.role, token.name, token.pair, token.head)
    try:
        return asyncio.run(_as(key, endpoint_of(token.address, PATH), question))
    except KeyRefusedError:
        raise AuthenticationError(
            f"the head at {token.address} refused this join token of {token.role} {token.name!r}: it was used already, "
            f"has expired (it is good for 15 minutes), or was revoked. Have another made there: "
            f"rlinf-actors keys enroll {token.name}{' --driver' if token.role == 'driver' else ''}"
        ) from None


def as_member(key: KeyFile, head: str | None, question: RotateKey) -> Enrolled:
    """What a member says of itself to the head, by its own key and never by another that is here. Blocks.

    Raises:
        ConfigError: the head's TCP address is not known.
        AuthenticationError: the key is not good (any more).
        ClusterTimeoutError: no answer.
    """
    endpoint = find_head(head, client_settings())
    if not endpoint.startswith("tcp://"):
        raise ConfigError("a key is changed by who has it, over TCP: say the head's HOST:PORT by --head")
    return asyncio.run(_as(key, endpoint, question))


def join_address(head: str | None, state_dir: str | None, given: str | None, name: str) -> str:
    """HOST:PORT by which a machine reaches the head. Blocks.

    Args:
        head, state_dir: as for `administer`.
        given: by the option, None to ask the head where it listens.
        name: of the machine, for the error.

    Raises:
        ConfigError: the head listens nowhere, or everywhere.
    """
    if given is not None:
        host, port = split_address(given, "--address")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    listens = administer(head, state_dir, GetKeys()).listens
    for endpoint in listens:
        if split_address(endpoint, "the head")[0] not in WILDCARDS:
            return endpoint.removeprefix("tcp://")
    if listens:
        raise ConfigError(
            f"the head listens on every address ({listens[0].removeprefix('tcp://')}): say by which {name} reaches it",
            path="--address",
        )
    raise ConfigError("the head does not listen on TCP: start it with --listen HOST:PORT")


async def _online(endpoint: str, settings: Settings, question: Body) -> Keys:
    async with observing(endpoint, settings) as client:
        return expected(await client.request(question, TIMEOUT_S), Keys)


async def _as(key: KeyFile, endpoint: str, question: Body) -> Enrolled:
    from rlinf_actors.net.zmq_network import ZmqNetwork

    network = ZmqNetwork(asyncio.get_running_loop(), Security.of(key))
    try:
        client = ControlClient(network, endpoint, f"observer:{uuid.uuid4().hex}".encode(), lambda notice: None)
        try:
            return expected(await client.request(question, TIMEOUT_S, first=True), Enrolled)
        finally:
            client.close()
    finally:
        network.close()


async def _offline(state_dir: str, settings: Settings, question: Question) -> Keys:
    """The same change to the state of a head that is not running; its file is ours as long as we have it open."""
    own = own_keys(find_key(settings, "head"), settings)
    if not (Path(state_dir) / FILE).exists():
        note(f"no head has had its state in {state_dir} yet")
    try:
        store = HeadStore(state_dir)
    except ConfigError as error:
        raise ConfigError(f"{error}. A head that runs is asked without --state-dir") from None
    try:
        out: list[Command] = []
        registry = KeyRegistry(out.append, store.remembered, own, lambda keys, why: None)
        try:
            changed = _change(registry, question)
        except Refusal as refused:
            raise refusal(Failed(0, refused.kind, refused.text, [], refused.path)) from None
        registry.flush()
        changes = [command.change for command in out if isinstance(command, Persist)]
        if changes and not await _written(store, changes):
            raise OSError(store.trouble)
        for record in (command for command in out if isinstance(command, LogEvent)):
            note(record.text)
        return Keys(changed, own.public, [], time.time())
    finally:
        store.close()


def _change(registry: KeyRegistry, question: Question) -> list[KeyState]:
    now = time.time()
    registry.begin(now)
    registry.tick(now)
    if isinstance(question, AddKey):
        return [registry.add(question, question.by, now)]
    if isinstance(question, RevokeKey):
        return registry.revoke(question, question.by, now)
    return registry.all()


async def _written(store: HeadStore, changes: list[Change]) -> bool:
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    store.write(changes, done.set_result)
    return await done
