"""`rlinf-actors keys`: the keys of a cluster on several machines. See docs/how-to/set-up-keys.md.

The first functions send a request to a head that has the list of keys: as administrator (`administer`), as holder of a
join token (`as_holder`), or as a node or driver with its own key (`as_member`). With --state-dir, `administer` changes
the stored list of a head that does not run. The commands follow.

A key file is written before its key is sent to the head, and removed only if the head certainly refused the key: a
listed key without a file would lock its owner out.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

import click
import msgspec

from rlinf_actors.cli.output import Amount, json_option, note, seconds, show, show_fields, show_json, show_table, warn
from rlinf_actors.cli.queries import TIMEOUT_S, ask_head, expected, find_head, head_option, observing
from rlinf_actors.errors import AuthenticationError, ClusterTimeoutError, ConfigError, UsageError
from rlinf_actors.head.commands import Command, LogEvent, Persist, Refused
from rlinf_actors.head.key_registry import TOKEN_S, KeyRegistry
from rlinf_actors.head.store import FILE, HeadStore, own_keys
from rlinf_actors.net.discovery import client_settings
from rlinf_actors.net.host import endpoint_of, split_address
from rlinf_actors.net.rpc import KeyRefusedError, refusal
from rlinf_actors.security import job, keyfile
from rlinf_actors.security.job import PATH, JoinToken
from rlinf_actors.security.keyfile import KeyFile, who
from rlinf_actors.security.keyfile import find as find_key
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import check_name, check_public, fingerprint
from rlinf_actors.settings import Settings
from rlinf_actors.wire.client_messages import AddKey, Enroll, Enrolled, GetKeys, Keys, KeyState, RevokeKey, RotateKey
from rlinf_actors.wire.control_codec import Body, Failed

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
    try:
        endpoint = find_head(head, settings)
    except ConfigError as error:
        raise ConfigError(f"{error}. For a head that does not run, give its state directory by --state-dir") from None
    return ask_head(endpoint, question, Keys)[1]


def as_holder(token: JoinToken, question: Enroll) -> Enrolled:
    """Send *question* to the head that the join token *token* names, as the holder of that token. Return the answer.
    Blocks.

    Raise AuthenticationError if the token is not valid, or if the head's key is not the key in the token.
    """
    key = KeyFile(token.role, token.name, token.pair, token.head)
    try:
        return _ask_by(key, endpoint_of(token.address, PATH), question)
    except KeyRefusedError:
        raise AuthenticationError(
            f"the head at {token.address} refused this join token of {token.role} {token.name!r}: it was used already, "
            f"has expired (15 minutes after it was made), or was revoked. Make another one there: "
            f"rlinf-actors keys enroll {token.name}{' --driver' if token.role == 'driver' else ''}"
        ) from None


def as_member(key: KeyFile, head: str | None, question: RotateKey) -> Enrolled:
    """Send *question*, the request for a new key, to the head, as the node or driver that has the key *key* now. Return
    the answer. *head* is the value of --head; the head must have a TCP address. Blocks.
    """
    endpoint = find_head(head, client_settings())
    if not endpoint.startswith("tcp://"):
        raise ConfigError("a member changes its key over TCP: give the head's HOST:PORT by --head")
    return _ask_by(key, endpoint, question)


def _ask_by(key: KeyFile, endpoint: str, question: Body) -> Enrolled:
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
        host, port = split_address(given, "--address")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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


def key_dict(key: KeyState) -> dict[str, Any]:
    """Return the JSON object of a key, as `keys list --json` prints it. Its keys are stable; new ones may be added.
    Times are in seconds since 1970.
    """
    return {"state": state_of(key), **msgspec.structs.asdict(key)}


def state_of(key: KeyState) -> str:
    """Return the state of a key, as the commands show it: good, token (an unused join token), retiring (replaced by a
    new key), or ended.
    """
    if key.ended_at is not None:
        return "ended"
    if key.token:
        return "token"
    return "good" if key.expires_at is None else "retiring"


def row_of(key: KeyState, at: float) -> tuple[str, ...]:
    """Return the cells of a key's row in the table of `keys list`. *at* is the head's time in seconds since 1970."""
    ends = "-" if key.expires_at is None else f"in {seconds(key.expires_at - at)}"
    if key.ended_at is not None:
        ends = f"{seconds(at - key.ended_at)} ago: {key.why}"
    listed = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.added_at))
    return key.name, key.role, state_of(key), fingerprint(key.public), listed, key.added_by, ends


dir_option = click.option(
    "--dir",
    "folder",
    metavar="DIR",
    help="The key directory. Default: RLINF_ACTORS_KEYS, else ~/.config/rlinf-actors/keys.",
)
state_option = click.option(
    "--state-dir", metavar="DIR", help="State directory of a head that does not run: change the list of keys there."
)
MEMBERS = ("agent", "driver")
REFUSED = (AuthenticationError, ConfigError, UsageError)
"""Errors after which the head has certainly not listed the key. After any other error, or Ctrl-C, it may have."""


@click.group()
def keys() -> None:
    """Manage the keys of a cluster: which machines and scripts may connect. See docs/how-to/set-up-keys.md."""


@keys.command()
@dir_option
@click.option("--name", metavar="NAME", help="Name of the drivers' key. Default: USER@HOST.")
@json_option
def init(folder: str | None, name: str | None, as_json: bool) -> None:
    """Make a key pair for the head, and one for drivers on its machine. Run it once per cluster, as the head's user."""
    directory = _directory(folder)
    path = keyfile.path_of(directory, "head")
    name = name or re.sub(r"[^A-Za-z0-9._@-]", "-", who()).lstrip("._@-")[:100] or "driver"
    check_name(name, "--name")
    for role in ("head", "driver"):
        there = keyfile.path_of(directory, role)
        if there.exists():
            raise _there_already(there)
    head = KeyFile("head", "head", KeyPair.make())
    driver = KeyFile("driver", name, KeyPair.make(), head.pair.public)
    try:
        keyfile.save_new(path, head)
    except FileExistsError:
        raise _there_already(path) from None  # by another `keys init` at the same time
    keyfile.save(keyfile.path_of(directory, "driver"), driver)
    data = {"dir": str(directory), "head": head.pair.public, "driver": driver.pair.public, "name": name}
    if as_json:
        show_json(data)
    else:
        show_fields(data)
    note("restart the head to use it; then `rlinf-actors keys enroll NODE` for each other machine")


@keys.command()
@click.argument("name")
@click.option("--driver", is_flag=True, help="The machine runs scripts and is no node.")
@click.option(
    "--address", metavar="HOST:PORT", help="Address at which the machine reaches the head. Default: the head's own."
)
@click.option("--file", "file", metavar="FILE", help="Write a key file to copy there, instead of a join token.")
@state_option
@head_option
@json_option
def enroll(
    name: str,
    driver: bool,
    address: str | None,
    file: str | None,
    state_dir: str | None,
    head: str | None,
    as_json: bool,
) -> None:
    """Print a join token, by which another machine gets its key. The token is valid for one use within 15 minutes. NAME
    is the name of the machine's node, or of its driver with --driver.

    The token is a secret until it is used: send it where others cannot read it.
    """
    check_name(name, "NAME")
    pair, role = KeyPair.make(), "driver" if driver else "agent"
    if file is not None and Path(file).exists():
        raise UsageError(f"{file} is there already")
    if file is None and address is None and state_dir is not None:
        raise UsageError("--state-dir needs --address: the address at which the head will listen")
    where = "" if file is not None else join_address(head, state_dir, address, name)
    if file is not None:  # write the file first: a listed key without a file is useless
        known = administer(head, state_dir, GetKeys()).head
        keyfile.save(Path(file), KeyFile(role, name, pair, known or pair.public), in_private=False)
    asked = AddKey(pair.public, "driver" if driver else "agent", name, who(), None if file is not None else TOKEN_S)
    try:
        answer = administer(head, state_dir, asked)
    except REFUSED:
        if file is not None:
            Path(file).unlink()
        raise
    data: dict[str, Any] = {"name": name, "role": role, "head": answer.head}
    if file is not None:
        data["file"] = file
        note(f"copy {file} to {role}.key in that machine's key directory (mode 0700), and delete it here")
    else:
        data |= {"token": JoinToken(where, answer.head, pair, role, name).text(), "expires_s": TOKEN_S}
        note(f"on {name}, within {TOKEN_S / 60:.0f} minutes: rlinf-actors keys join TOKEN (or -, to paste it)")
    show(as_json, data, data.get("token") or file)
    warn(answer.warning)


@keys.command()
@click.argument("token")
@dir_option
@json_option
def join(token: str, folder: str | None, as_json: bool) -> None:
    """Make a key for this machine, and add it to the head's list of keys by the join TOKEN. If TOKEN is -, the token is
    read from stdin.
    """
    content = job.parse(sys.stdin.readline() if token == "-" else token)
    path = keyfile.path_of(_directory(folder), content.role)
    key = KeyFile(content.role, content.name, KeyPair.make(), content.head)
    try:
        keyfile.save_new(path, key)
    except FileExistsError:
        there = keyfile.load(path)
        raise UsageError(
            f"{path} is there already, the key of {there.role} {there.name!r}: `rlinf-actors keys rotate` changes it; "
            "to begin anew, move it away"
        ) from None
    try:
        answer = as_holder(content, Enroll(key.pair.public))
    except REFUSED:
        path.unlink()
        raise
    except ClusterTimeoutError as error:
        raise ClusterTimeoutError(
            f"{error} If it has taken the key, that is in {path}; else remove that file"
        ) from None
    show(as_json, {"name": key.name, "role": key.role, "file": str(path), "address": content.address}, path)
    warn(answer.warning)
    if key.role == "agent":
        note(f"{key.name} is listed; start it: agentd --connect {content.address}")
    else:
        note(f"driver {key.name} is listed; for scripts: export RLINF_HEAD={content.address}")


@keys.command("list")
@click.option("--all", "everything", is_flag=True, help="Also show keys that are no longer valid.")
@state_option
@head_option
@json_option
def list_(everything: bool, state_dir: str | None, head: str | None, as_json: bool) -> None:
    """Show the keys that the head accepts."""
    answer = administer(head, state_dir, GetKeys())
    if as_json:
        show_json({"head": answer.head, "keys": [key_dict(key) for key in answer.keys]})
        return
    show_table(
        ("NAME", "ROLE", "STATE", "KEY", "LISTED", "BY", "EXPIRES"),
        [row_of(key, answer.at) for key in answer.keys if everything or key.ended_at is None],
        "the head lists no keys" if answer.head else "this head has no keys: `rlinf-actors keys init`",
    )


@keys.command()
@click.argument("name")
@click.option("--role", type=click.Choice(MEMBERS), help="Needed if a node and a driver have the same name.")
@state_option
@head_option
@json_option
def revoke(name: str, role: Any, state_dir: str | None, head: str | None, as_json: bool) -> None:
    """End the keys and join tokens of NAME, and the connections made with them, at once.

    If NAME is a node, the head then reports the node and its workers lost. If NAME is a driver, its groups are stopped.
    """
    answer = administer(head, state_dir, RevokeKey(name, who(), role))
    if as_json:
        show_json({"revoked": [key_dict(key) for key in answer.keys]})
    else:
        for key in answer.keys:
            click.echo(f"{'join token' if key.token else 'key'} {fingerprint(key.public)} of {key.role} {key.name}")
    if answer.warning:  # a head that is restarted would let it in again
        raise OSError(answer.warning)


@keys.command()
@dir_option
@click.option(
    "--role", type=click.Choice((*MEMBERS, "head")), help="The key to change; needed if this machine has several keys."
)
@click.option(
    "--keep",
    "keep_h",
    type=Amount(min=0.0, max=24.0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Time for which the old key stays valid, for running programs; 0 ends it at once.",
)
@head_option
@json_option
def rotate(folder: str | None, role: str | None, keep_h: float, head: str | None, as_json: bool) -> None:
    """Give this machine a new key. The old key stays valid for --keep hours: restart running programs within that time.

    `--role head` makes a new key pair for the head itself, which the head uses from its next start. Every other machine
    must then run `rlinf-actors keys trust`, and does not reach the head until then.
    """
    directory = _directory(folder)
    path = _one_of(directory, role)
    old = keyfile.load(path)
    new = replace(old, pair=KeyPair.make())
    if old.role == "head":
        keyfile.save(path, new)
        _point(directory, new.pair.public)
        note("restart the head: until then it has the old key, and this machine's driver does not reach it")
        note(f"then on every other machine: rlinf-actors keys trust '{new.pair.public}'")
    else:
        _rotate_member(path, old, new, head, keep_h)
    public = new.pair.public
    show(as_json, {"role": new.role, "name": new.name, "file": str(path), "public": public}, public)


@keys.command()
@click.argument("public")
@dir_option
@json_option
def trust(public: str, folder: str | None, as_json: bool) -> None:
    """Accept PUBLIC as the head's key on this machine from now on. This is needed after `rlinf-actors keys rotate
    --role head` on the head's machine.
    """
    check_public(public, "PUBLIC")
    directory = _directory(folder)
    changed = _point(directory, public)
    if not changed:
        raise UsageError(f"there is no agent.key or driver.key in {directory}")
    show(as_json, {"head": public, "files": changed}, "\n".join(changed))
    note("restart the programs that use it")


def _rotate_member(path: Path, old: KeyFile, new: KeyFile, head: str | None, keep_h: float) -> None:
    beside = path.with_name(f"{path.name}.new")
    try:
        keyfile.save_new(beside, new)  # first: a key that the head lists and nobody has would shut this machine out
    except FileExistsError:
        left = fingerprint(keyfile.load(beside).pair.public)
        raise UsageError(
            f"an earlier rotation has not ended, and left {beside}. If `rlinf-actors keys list` on the head's machine "
            f"has its key, {left}: mv {beside} {path}. If not: rm {beside}"
        ) from None
    try:
        answer = as_member(old, head, RotateKey(new.pair.public, keep_h * 3600))
    except REFUSED:
        beside.unlink()
        raise
    except ClusterTimeoutError as error:
        raise ClusterTimeoutError(f"{error} If it has taken the new key, that is in {beside}") from None
    beside.replace(path)
    warn(answer.warning)
    when = f"the old key is valid for {keep_h:g} hours" if keep_h else "the old key is no longer valid"
    note(f"{when}: restart the programs that run here as {new.role} {new.name}")


def _there_already(path: Path) -> UsageError:
    return UsageError(f"{path} is there already: `rlinf-actors keys rotate` changes a key, --dir makes others")


def _point(directory: Path, public: str) -> list[str]:
    """Write the head's new public key into the key files of node and driver in *directory*, and return the paths of
    these files.
    """
    there = [path for path in (keyfile.path_of(directory, role) for role in MEMBERS) if path.exists()]
    for path in there:
        keyfile.save(path, replace(keyfile.load(path), head=public))
    return [str(path) for path in there]


def _one_of(directory: Path, role: str | None) -> Path:
    roles = (role,) if role is not None else MEMBERS
    there = [path for path in (keyfile.path_of(directory, one) for one in roles) if path.exists()]
    if not there:
        raise UsageError(f"there is no {' or '.join(f'{one}.key' for one in roles)} in {directory}")
    if len(there) > 1:
        raise UsageError(f"{directory} has several keys: choose one by --role")
    return there[0]


def _directory(folder: str | None) -> Path:
    return Path(folder) if folder else keyfile.directory(Settings.load())
