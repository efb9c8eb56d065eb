"""Every command, on a real terminal, before a head whose every text has escape sequences: none reaches the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pace
import pytest
from msgspec import inspect

from rlinf_actors.head.operations import KINDS
from rlinf_actors.net.rpc import ControlServer
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.security.job import PREFIX, JoinToken
from rlinf_actors.security.keypair import KeyPair
from rlinf_actors.security.members import Member
from rlinf_actors.wire import client_messages as messages
from rlinf_actors.wire import key_messages
from rlinf_actors.wire.control_codec import Envelope, Request
from rlinf_actors.wire.node_questions import AskNode, NodeAnswered, said

pytestmark = pytest.mark.slow

CLEAR = "\x1b[2J\x1b]0;title\x07\x9b2J\u202e\x1b[31m"
"""Clears a terminal, sets its title, turns the direction of the text around, and leaves it red."""

ANSWERS: dict[type, type] = {
    messages.GetStatus: messages.Status,
    messages.GetEvents: messages.Events,
    messages.GetKeys: messages.Keys,
    messages.AddKey: messages.Keys,
    messages.RevokeKey: messages.Keys,
    messages.EStop: messages.EStopped,
    messages.DrainNode: messages.Drained,
    messages.EndGroup: messages.Done,
    messages.StopCluster: messages.Done,
    key_messages.RotateKey: key_messages.Enrolled,
    key_messages.Enroll: key_messages.Enrolled,
    **{question: kind.answer for question, kind in KINDS.items()},
}
NAME = f"n{CLEAR}"
VERBS = [
    ("status",),
    ("nodes",),
    ("groups",),
    ("workers",),
    ("workers", NAME),
    ("events",),
    ("node", "show", NAME),
    ("node", "drain", NAME),
    ("groups", "stop", NAME),
    ("groups", "stop", "other"),
    ("job", "list"),
    ("job", "show", NAME),
    ("job", "stop", NAME),
    ("stack", NAME),
    ("stack", "--all"),
    ("top",),
    ("top", "--view", "nodes"),
    ("keys", "list", "--all"),
    ("keys", "revoke", NAME),
    ("keys", "enroll", "gpu-1"),
    ("head", "stop", "--yes"),
    ("plan", "CONF"),
    ("plan", "CONF", "--routes", "a,b"),
    ("units", "print", "--firewall"),
    ("estop",),
    ("estop", "--release"),
    (NAME,),
    ("status", f"--{NAME}"),
]
RUN = """
import json, sys
from rlinf_actors.cli import app, estop
for verb in json.loads(sys.argv[1]):
    print("VERB", json.dumps(verb), flush=True)
    estop.main(verb[1:]) if verb[0] == "estop" else app.run(verb)
    sys.stdout.flush()
"""


def hostile(info: Any, pick: int) -> Any:
    """Return a value of the type *info* with CLEAR in each text. *pick* chooses between the values of a Literal."""
    if isinstance(info, inspect.Metadata):
        return hostile(info.type, pick)
    if isinstance(info, inspect.UnionType):
        return hostile(next(one for one in info.types if not isinstance(one, inspect.NoneType)), pick)
    if isinstance(info, inspect.StructType):
        return info.cls(**{field.name: hostile(field.type, pick) for field in info.fields})
    if isinstance(info, inspect.ListType):
        return [hostile(info.item_type, pick)]
    if isinstance(info, inspect.VarTupleType):
        return (hostile(info.item_type, pick),)
    if isinstance(info, inspect.TupleType):
        return tuple(hostile(one, pick) for one in info.item_types)
    if isinstance(info, inspect.DictType):
        return {hostile(info.key_type, pick): hostile(info.value_type, pick)}
    if isinstance(info, inspect.LiteralType):
        return info.values[pick]
    if isinstance(info, inspect.BoolType):
        return bool(pick)
    if isinstance(info, inspect.StrType):
        return NAME
    if isinstance(info, inspect.EnumType):
        return next(iter(info.cls))
    return {inspect.IntType: 7, inspect.FloatType: 7.0, inspect.BytesType: b"x"}.get(type(info))


def answer_to(body: object, pick: int) -> Any:
    made = hostile(inspect.type_info(ANSWERS[type(said(body))]), pick)
    if isinstance(made, messages.Status):
        ranked = [msgspec.structs.replace(node, rank=0, state="ready") for node in made.nodes]
        return msgspec.structs.replace(made, nodes=ranked)
    if isinstance(body, AskNode):
        return NodeAnswered(made)
    return msgspec.structs.replace(made, more=False) if isinstance(made, messages.Events) else made


HEAD = KeyPair.make()


class Open:
    """Admits every key."""

    def admit(self, public_key: str) -> Member:
        return Member("driver", "any", key=public_key)

    def refused(self, public_key: str, address: str, why: str = "", times: int = 1) -> None:
        raise AssertionError(why)


@pytest.fixture
async def head(tmp_path) -> AsyncIterator[str]:
    """The endpoint of a head that answers every second time with a refusal."""
    (tmp_path / "run").mkdir(mode=0o700)
    with hostile_head(f"ipc://{tmp_path}/run/head", Security()) as endpoint:
        yield endpoint


@pytest.fixture
async def keyed_head() -> AsyncIterator[str]:
    """The address of such a head with keys."""
    with hostile_head("tcp://127.0.0.1:0", Security(False, HEAD, HEAD.public)) as endpoint:
        yield endpoint.removeprefix("tcp://")


@contextlib.contextmanager
def hostile_head(endpoint: str, security: Security) -> Iterator[str]:
    count = 0

    def came(peer: bytes, envelope: Envelope) -> None:
        nonlocal count
        if isinstance(envelope, Request):
            count += 1
            if type(said(envelope.body)) not in ANSWERS or count % 3 == 0:
                server.fail(peer, envelope.id, "config", f"refused {CLEAR}", path=CLEAR)
            else:
                server.reply(peer, envelope.id, answer_to(envelope.body, -(count % 2)))

    network = ZmqNetwork(asyncio.get_running_loop(), security)
    server = ControlServer(network, came, gate=Open())
    yield server.bind(endpoint)
    server.close()
    network.close()


async def on_terminal(command: list[str], **env: str) -> str:
    """Run a command whose output and errors are a terminal, and return what the terminal gets."""
    ours, theirs = os.openpty()
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=theirs, stderr=theirs, env={**os.environ, **env}
            )
        finally:
            os.close(theirs)
        read = asyncio.ensure_future(asyncio.to_thread(_all, ours))
        await asyncio.wait_for(process.wait(), pace.PATIENCE_S)
        return (await read).decode()
    finally:
        os.close(ours)


def _all(terminal: int) -> bytes:
    found = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # EIO: no process has it open any more
            return found
        found += part


def unsafe(text: str) -> list[str]:
    """Return what a terminal acts on."""
    return re.findall(r"[^\x20-\x7e\xa0-\uffff\n\r]|[\u202a-\u202e]", text)


async def harmless(verbs: list[list[str]], head: str) -> dict[int, str]:
    """Run the commands on a terminal, and return what each printed, in which nothing may act on the terminal."""
    out = await on_terminal(
        [sys.executable, "-c", RUN, json.dumps(verbs)],
        RLINF_HEAD=head, COLUMNS="4000", TERM="xterm-256color", NO_COLOR="1",
    )  # fmt: skip
    assert "Traceback" not in out
    said = dict(enumerate(out.split("VERB ")[1:]))
    assert len(said) == len(verbs), out[-2000:]
    for number, text in said.items():
        assert not unsafe(text), (verbs[number], text)
    return said


async def test_no_verb_passes_escape_sequences_on(head, tmp_path):
    conf = tmp_path / "conf.yaml"
    groups = "[{label: all, node_ranks: 0}]"
    placed = "{a: {node_group: node, placement: 0:0-1}, b: {node_group: node, placement: 0}}"
    conf.write_text(f"cluster: {{num_nodes: 1, component_placement: {placed}, node_groups: {groups}}}\n")
    verbs = [[str(conf) if word == "CONF" else word for word in verb] for verb in VERBS]
    both = [*verbs, *([*verb, "--json"] for verb in verbs)] * 2  # each gets answers and refusals
    both.append(["doctor"])  # takes a second
    said = await harmless(both, head)
    escaped = {both[number][0] for number, text in said.items() if r"\x1b[2J" in text or r"\u001b[2J" in text}
    assert escaped >= {verb[0] for verb in verbs} - {"units"}, "the texts did come"


def key_text(**fields: str) -> str:
    pair = KeyPair.make()
    found = {
        "role": "driver",
        "name": "ada",
        "public": pair.public,
        "secret": pair.secret,
        "head": HEAD.public,
        **fields,
    }
    return "".join(f"{name} {value}\n" for name, value in found.items())


KEY_FILES = {
    "good": key_text(),
    "good-too": key_text(),
    "line": key_text() + f"{CLEAR}\n",
    "role": key_text(role=CLEAR),
    "name": key_text(name=CLEAR),
    "public": key_text(public=CLEAR),
    "secret": key_text(secret=CLEAR),
    "head": key_text(head=CLEAR),
    "address": key_text(address=CLEAR, node=CLEAR),
    f"dir{CLEAR}": key_text(),
    f"none{CLEAR}": "",
}
"""A driver.key by the name of its directory."""


def hostile_keys(place: Path, address: str) -> tuple[list[list[str]], list[str]]:
    """Return commands about keys, each of whose texts is hostile in one of them, and join tokens that parse."""
    folders = []
    for name, text in KEY_FILES.items():
        folders.append(place / name)
        folders[-1].mkdir(mode=0o700)
        if text:
            (folders[-1] / "driver.key").touch(0o600)
            (folders[-1] / "driver.key").write_text(text)
    tokens = [JoinToken(address, HEAD.public, KeyPair.make(), "agent", f"n{number}").text() for number in range(4)]
    fields = {"address": address, "head": HEAD.public, "pair": KeyPair.make(), "role": "agent", "name": "n1"}
    for name in ("address", "head", "role", "name"):
        tokens.append(JoinToken(**{**fields, name: CLEAR}).text())  # type: ignore[arg-type]
    tokens.append(JoinToken(**{**fields, "address": f"{CLEAR}:7"}).text())  # type: ignore[arg-type]
    verbs = [["rotate", "--dir", str(folder), "--head", address] for folder in folders]
    verbs += [
        ["rotate", "--dir", str(folders[0]), "--head", where] for where in (CLEAR, f"{CLEAR}:1", f"tcp://{CLEAR}")
    ]
    verbs += [["trust", HEAD.public, "--dir", str(folder)] for folder in folders]
    verbs += [["trust", text, "--dir", str(folders[0])] for text in (CLEAR, CLEAR.ljust(40)[:40])]
    verbs += [["join", token, "--dir", str(place / f"join-{number}")] for number, token in enumerate(tokens)]
    verbs += [["join", text, "--dir", str(folders[0])] for text in (CLEAR, f"{PREFIX}{CLEAR}", tokens[0][:50] + CLEAR)]
    verbs += [["join", tokens[0], "--dir", str(folder)] for folder in (folders[-2], folders[-1], folders[2])]
    verbs += [["init", "--dir", str(folder), "--name", name] for folder in folders[-2:] for name in ("kim", CLEAR)]
    for more in (
        ("--address", CLEAR), ("--address", f"{CLEAR}:1"), ("--user", CLEAR), ("--driver", "--nodes", CLEAR),
        ("--driver", "--group", CLEAR), ("--expires", CLEAR), ("--file", str(place / f"file{CLEAR}")),
        ("--file", str(place / f"nowhere{CLEAR}" / "file")), ("--state-dir", str(place / f"state{CLEAR}")),
    ):  # fmt: skip
        verbs.append(["enroll", "n1", *more])
    return [["keys", *verb] for verb in [*verbs, ["enroll", CLEAR]]], tokens


async def test_no_command_about_keys_passes_escape_sequences_on(head, keyed_head, tmp_path):
    verbs, tokens = hostile_keys(tmp_path, keyed_head)
    both = [*verbs, *([*verb, "--json"] for verb in verbs)]
    said = await harmless(both, head)
    escaped = {both[number][1] for number, text in said.items() if r"\x1b[2J" in text.partition("\n")[2]}
    assert escaped >= {"rotate", "trust", "join", "enroll"}, "the texts did come"
    for token in (*tokens, CLEAR):
        command = [sys.executable, "-m", "agentd", "--connect", keyed_head, "--token", token, "--check-config"]
        text = await on_terminal(command, RLINF_ACTORS_KEYS=str(tmp_path / f"agentd{CLEAR}"))
        assert not unsafe(text), (token, text)


SCRIPT = """
import asyncio, logging, sys
from rlinf_actors.errors import WorkerError
from rlinf_actors.runtime import driver_log
driver_log.set_up({})
clear = sys.argv[1]
cause = ValueError(clear)
error = WorkerError(clear, remote_traceback=clear)
error.__cause__ = cause
logging.getLogger("rlinf_actors.group").warning("%s: %s", clear, error)
logging.getLogger("rlinf_actors.group").error("failed", exc_info=error)
async def fails():
    asyncio.get_running_loop().call_exception_handler({"message": "lost", "exception": error})
asyncio.run(fails())
logging.getLogger("mine").warning("my own %s", "\\x1b[31m")
raise error
"""


async def test_a_drivers_log_and_its_last_traceback_are_harmless():
    """With the default handlers of logging, of asyncio and of uncaught exceptions."""
    out = await on_terminal([sys.executable, "-c", SCRIPT, CLEAR])
    assert out.count("my own \x1b[31m") == 1, "the program's own messages stay"
    assert not unsafe(out.replace("my own \x1b[31m", ""))
    assert out.count("ValueError: \\x1b[2J") == 3
