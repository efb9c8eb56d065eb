"""Requests of `rlinf-actors keys` to the head that has the list of keys.

They are those of an administrator (`administer`), and of a node or driver with its own key (`as_member`). With
--state-dir, `administer` changes the stored list of a head that does not run.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Union

from rlinf_actors.cli.output import note
from rlinf_actors.cli.queries import TIMEOUT_S, ask_head, find_head, observing
from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.head.commands import Command, LogEvent, Persist, Refused
from rlinf_actors.head.key_registry import KeyRegistry
from rlinf_actors.head.store import FILE, HeadStore, own_keys
from rlinf_actors.net.discovery import client_settings
from rlinf_actors.net.host import joined_address, split_address
from rlinf_actors.net.rpc import refusal
from rlinf_actors.security.keyfile import KeyFile
from rlinf_actors.security.keyfile import find as find_key
from rlinf_actors.settings import Settings
from rlinf_actors.wire.control_codec import Failed
from rlinf_actors.wire.key_messages import AddKey, Enrolled, GetKeys, Keys, RevokeKey, RotateKey
from rlinf_actors.wire.protocol import expected

Question = Union[AddKey, GetKeys, RevokeKey]
WILDCARDS = ("0.0.0.0", "::", "*")


def administer(head: str | None, state_dir: str | None, question: Question) -> Keys:
    """Send an administrator's request about keys to the head that --head names, and return the answer. Blocks.

    If *state_dir* is given, no head is asked: the request is applied to the stored state of a head in that directory.
    The head must not be running.
    """
    settings = client_settings()
    if state_dir is not None:
        if head is not None:
            raise UsageError(
                "--head asks a running head, --state-dir changes the list of one that does not run: give one of them"
            )
        note(f"no head is asked: the head with state in {state_dir} will have this list when it starts")
        return asyncio.run(_offline(state_dir, settings, question))
    return ask_head(running_head(head), question, Keys)[1]


def running_head(head: str | None) -> str:
    """Return the endpoint of the head that --head names, or of the one that is found.

    Prints which one is found. So a command with several requests calls this once, and passes the result on as *head*.
    """
    try:
        return find_head(head, client_settings())
    except ConfigError as error:
        raise ConfigError(f"{error}. For a head that does not run, give its state directory by --state-dir") from None


def as_member(key: KeyFile, head: str | None, question: RotateKey) -> Enrolled:
    """Send *question*, the request for a new key, to the head, as the node or driver that has the key *key* now. Return
    the answer. *head* is the value of --head; the head must have a TCP address. Blocks.
    """
    endpoint = find_head(head, client_settings())
    if not endpoint.startswith("tcp://"):
        raise ConfigError("a node or driver changes its key over TCP: give the head's HOST:PORT by --head")

    async def ask() -> Enrolled:
        async with observing(endpoint, Settings.load(), key) as client:
            return expected(await client.request(question, TIMEOUT_S, first=True), Enrolled)

    return asyncio.run(ask())


def join_address(head: str | None, state_dir: str | None, given: str | None, name: str) -> str:
    """Return the HOST:PORT at which the machine *name* reaches the head: *given*, the value of --address. If *given* is
    None, ask the head for its addresses (*head* and *state_dir* as for `administer`), and return the first usable one.

    Blocks. Raise ConfigError if the head does not listen on TCP, or if it only has a wildcard address such as 0.0.0.0,
    which no other machine can connect to.
    """
    if given is not None:
        return joined_address(*split_address(given, "--address"))
    listens = administer(head, state_dir, GetKeys()).listens
    for endpoint in listens:
        if split_address(endpoint, "the head")[0] not in WILDCARDS:
            return endpoint.removeprefix("tcp://")
    if listens:
        raise ConfigError(
            f"the head listens on every address ({listens[0].removeprefix('tcp://')}): say which {name} can reach",
            path="--address",
        )
    raise ConfigError("the head does not listen on TCP: start it with --listen HOST:PORT")


async def _offline(state_dir: str, settings: Settings, question: Question) -> Keys:
    """Apply an administrator's request about keys to the stored state of a head that does not run. A lock keeps a
    head from starting with this state meanwhile.
    """
    own = own_keys(find_key(settings, "head"), settings)
    if not (Path(state_dir) / FILE).exists():
        note(f"{state_dir} has no state of a head yet")
    try:
        store = HeadStore(state_dir)
    except ConfigError as error:
        raise ConfigError(f"{error}. To ask a running head, leave --state-dir out") from None
    try:
        out: list[Command] = []
        registry = KeyRegistry(out.append, store.remembered, own, lambda keys, why: None)
        try:
            now = time.time()
            registry.begin(now)
            registry.tick(now)
            if isinstance(question, AddKey):
                changed = [registry.add(question, question.by, now)]
            elif isinstance(question, RevokeKey):
                changed = registry.revoke(question, question.by, now)
            else:
                changed = registry.all()
        except Refused as refused:
            raise refusal(Failed(0, refused.kind, refused.text, [], refused.path)) from None
        registry.flush()
        changes = [command.change for command in out if isinstance(command, Persist)]
        if changes:
            written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            store.write(changes, written.set_result)
            if not await written:
                raise OSError(store.trouble)
        for record in (command for command in out if isinstance(command, LogEvent)):
            note(record.text)
        return Keys(changed, own.public, [], time.time())
    finally:
        store.close()
