"""`rlinf-actors keys`: the keys of a cluster on several machines. See docs/how-to/set-up-keys.md.

A key file is written before its key is sent to the head, and removed only if the head certainly refused the key: a
listed key without a file would lock its owner out.
"""

from __future__ import annotations

import math
import re
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from rlinf_actors.cli.key_requests import administer, as_member, join_address, running_head
from rlinf_actors.cli.output import (
    Amount,
    Days,
    echo,
    json_option,
    note,
    show,
    show_fields,
    show_json,
    show_table,
    warn,
)
from rlinf_actors.cli.queries import head_option
from rlinf_actors.errors import AuthenticationError, ClusterTimeoutError, ConfigError, UsageError
from rlinf_actors.head.key_registry import TOKEN_S, ends_at
from rlinf_actors.model.readable import duration
from rlinf_actors.net import enrolment
from rlinf_actors.net.host import split_address
from rlinf_actors.net.socket_security import is_loopback
from rlinf_actors.runtime.progress import Facts, showing_blocked
from rlinf_actors.security import job, keyfile
from rlinf_actors.security.job import JoinToken
from rlinf_actors.security.keyfile import KeyFile, who
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import check_name, check_public, fingerprint
from rlinf_actors.settings import KEY_FILE, Settings
from rlinf_actors.wire.key_messages import AddKey, GetKeys, KeyLimits, KeyRole, KeyState, RevokeKey, RotateKey


def key_dict(key: KeyState) -> dict[str, Any]:
    """Return the JSON object of a key, as `keys list --json` prints it. Its keys are stable; new ones may be added.
    Times are in seconds since 1970.
    """
    fields = msgspec.structs.asdict(key)
    limits = msgspec.structs.asdict(fields.pop("limits"))
    return {"state": state_of(key), **fields, **limits}


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
    left = ends_at(key) - at
    ends = "-" if math.isinf(left) else f"in {duration(left)}"
    if key.ended_at is not None:
        ends = f"{duration(at - key.ended_at)} ago: {key.why}"
    listed = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.added_at))
    user = key.limits.user or "-"
    limits = [*(f"@{group}" for group in key.limits.groups), *key.limits.nodes]
    return (
        key.name,
        key.role,
        user,
        ", ".join(limits) or "-",
        state_of(key),
        fingerprint(key.public),
        listed,
        key.added_by,
        ends,
    )


dir_option = click.option(
    "--dir",
    "folder",
    metavar="DIR",
    help="The key directory. Default: RLINF_ACTORS_KEYS, else ~/.config/rlinf-actors/keys.",
)
state_option = click.option(
    "--state-dir", metavar="DIR", help="State directory of a head that does not run: change the list of keys there."
)
MEMBERS = ("agent", "driver", "viewer")
ROTATED = ("agent", "driver")
"""Roles that change their own keys. A viewer changes nothing: it gets another key."""
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
@click.option("--viewer", is_flag=True, help="A read-only key, for all jobs: for `rlinf-actors serve`.")
@click.option(
    "--address", metavar="HOST:PORT", help="Address at which the machine reaches the head. Default: the head's own."
)
@click.option("--file", "file", metavar="FILE", help="Write a key file to copy there, instead of a join token.")
@click.option("--user", metavar="USER", help="The user as whom agentd runs on the node. Default: who uses the token.")
@click.option("--expires", type=Days(), metavar="90d", help="When the key expires: 90d, 12h. Default: never.")
@click.option("--replace", "replaces", is_flag=True, help="Replace a valid key of NAME, which stays valid for a day.")
@click.option(
    "--nodes",
    multiple=True,
    metavar="PATTERN",
    help="With --driver: launch only on nodes whose name fits, or with LABEL=VALUE their label. May be repeated.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="With --driver: a group of drivers, which nodes admit as @GROUP. May be repeated.",
)
@state_option
@head_option
@json_option
def enroll(
    name: str,
    driver: bool,
    viewer: bool,
    address: str | None,
    file: str | None,
    user: str | None,
    expires: float | None,
    replaces: bool,
    nodes: tuple[str, ...],
    groups: tuple[str, ...],
    state_dir: str | None,
    head: str | None,
    as_json: bool,
) -> None:
    """Print a join token, by which another machine gets its key. The token is valid for one use within 15 minutes. NAME
    is the name of the machine's node, of its driver with --driver, or of its viewer with --viewer.

    The token is a secret until it is used: send it where others cannot read it.
    """
    check_name(name, "NAME")
    if driver and viewer:
        raise UsageError("--driver and --viewer are two keys: make one after the other")
    if (driver or viewer) and user:
        raise UsageError("--user is for nodes: the key of a driver or viewer is a file of its user")
    if not driver and (nodes or groups):
        raise UsageError("--nodes and --group are for drivers: give --driver too")
    role: KeyRole = "driver" if driver else "viewer" if viewer else "agent"
    pair = KeyPair.make()
    if file is not None and Path(file).exists():
        raise UsageError(f"{file} is there already")
    if file is None and address is None and state_dir is not None:
        raise UsageError("--state-dir needs --address: the address at which the head will listen")
    head = running_head(head) if state_dir is None else head
    where = "" if file is not None else join_address(head, state_dir, address, name)
    node_id = uuid.uuid4().hex[:12] if file is not None and role == "agent" else ""
    limits = KeyLimits(user or "", node_id, nodes=nodes, groups=groups)
    if file is not None:  # write the file first: a listed key without a file is useless
        known = administer(head, state_dir, GetKeys()).head
        made = KeyFile(role, name, pair, known or pair.public, node=limits.node_id)
        keyfile.save(Path(file), made, in_private=False)
    token_s = None if file is not None else TOKEN_S
    asked = AddKey(pair.public, role, name, who(), token_s, limits, expires, replaces)
    try:
        answer = administer(head, state_dir, asked)
    except REFUSED:
        if file is not None:
            Path(file).unlink()
        raise
    except ClusterTimeoutError as error:
        left = "" if file is None else f" If it has listed the key, that is in {file}; else remove that file"
        raise ClusterTimeoutError(f"{error}{left}") from None
    data: dict[str, Any] = {"name": name, "role": role, "head": answer.head}
    if file is not None:
        data["file"] = file
        note(f"copy {file} to {role}.key in that machine's key directory (mode 0700), and delete it here")
    else:
        token = JoinToken(where, answer.head, pair, role, name).text()
        command = f"rlinf-actors keys join {token}" if role != "agent" else f"agentd --connect {where} --token {token}"
        data |= {"token": token, "expires_s": TOKEN_S, "command": command}
        note(f"on {name}, within {TOKEN_S / 60:.0f} minutes:\n{command}")
    if as_json or file is not None or not (sys.stdout.isatty() and sys.stderr.isatty()):  # else the note has the token
        show(as_json, data, data.get("token") or file)
    warn(answer.warning)


@keys.command()
@click.argument("token")
@dir_option
@json_option
def join(token: str, folder: str | None, as_json: bool) -> None:
    """Make a key for this machine, and add it to the head's list of keys by the join TOKEN. If TOKEN is -, the token is
    read from stdin.

    Waits 30 s for the head. If it fails, run the same command again.
    """
    content = job.parse(sys.stdin.readline() if token == "-" else token)
    user = "" if folder else keyfile.user()  # another directory is for another user, as those of units are
    with showing_blocked(lambda: Facts("waiting for the head to take this machine's key")):
        joined = enrolment.join(content, _directory(folder), note, user=user)
    key = joined.key
    show(as_json, {"name": key.name, "role": key.role, "file": key.path, "address": content.address}, key.path)
    warn(joined.warning)
    # on loopback, keys of a cluster elsewhere are not looked for
    named = f"{KEY_FILE}={key.path} " if is_loopback(split_address(content.address, job.PATH)[0]) else ""
    if key.role == "agent":
        note(f"{key.name} is listed; start it:\n{named}agentd --connect {content.address}")
    elif key.role == "viewer":
        note(f"viewer {key.name} is listed; start it:\n{named}rlinf-actors serve --head {content.address}")
    else:
        note(f"driver {key.name} is listed; for scripts:\nexport {named}RLINF_HEAD={content.address}")


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
        ("NAME", "ROLE", "USER", "LIMITS", "STATE", "KEY", "LISTED", "BY", "EXPIRES"),
        [row_of(key, answer.at) for key in answer.keys if everything or key.ended_at is None],
        "the head lists no keys" if answer.head else "this head has no keys: `rlinf-actors keys init`",
    )


@keys.command()
@click.argument("name")
@click.option("--role", type=click.Choice(MEMBERS), help="Needed if a node and a driver have the same name.")
@click.option("--user", metavar="USER", help="End only the keys of this user of the node.")
@state_option
@head_option
@json_option
def revoke(name: str, role: Any, user: str | None, state_dir: str | None, head: str | None, as_json: bool) -> None:
    """End the keys and join tokens of NAME, and the connections made with them, at once.

    If NAME is a node, the head then reports the node and its workers lost. If NAME is a driver, its groups are stopped.
    """
    answer = administer(head, state_dir, RevokeKey(name, who(), role, user))
    if as_json:
        show_json({"revoked": [key_dict(key) for key in answer.keys]})
    else:
        for key in answer.keys:
            echo(f"{'join token' if key.token else 'key'} {fingerprint(key.public)} of {key.role} {key.name}")
    if answer.warning:  # a head that is restarted would let it in again
        raise OSError(answer.warning)


@keys.command()
@dir_option
@click.option(
    "--role", type=click.Choice((*ROTATED, "head")), help="The key to change; needed if this machine has several keys."
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
        raise UsageError(f"there is no agent.key, driver.key or viewer.key in {directory}")
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
    when = f"the old key is valid for {keep_h:g} h" if keep_h else "the old key is no longer valid"
    note(f"{when}: restart the programs that run here as {new.role} {new.name}")


def _there_already(path: Path) -> UsageError:
    return UsageError(f"{path} is there already: `rlinf-actors keys rotate` changes a key, --dir makes others")


def _point(directory: Path, public: str) -> list[str]:
    """Write the head's new public key into the key files of members in *directory*, and return the paths of
    these files.
    """
    there = [path for path in (keyfile.path_of(directory, role) for role in MEMBERS) if path.exists()]
    for path in there:
        keyfile.save(path, replace(keyfile.load(path), head=public))
    return [str(path) for path in there]


def _one_of(directory: Path, role: str | None) -> Path:
    roles = (role,) if role is not None else ROTATED
    there = [path for path in (keyfile.path_of(directory, one) for one in roles) if path.exists()]
    if not there:
        raise UsageError(f"there is no {' or '.join(f'{one}.key' for one in roles)} in {directory}")
    if len(there) > 1:
        raise UsageError(f"{directory} has several keys: choose one by --role")
    return there[0]


def _directory(folder: str | None) -> Path:
    return Path(folder) if folder else keyfile.directory(Settings.load())
