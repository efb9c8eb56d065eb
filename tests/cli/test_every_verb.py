"""Every verb that only asks, once in a terminal, once piped and once with --json, against one living cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click
import pytest
from terminal import terminal
from test_json_page import keys_of

from rlinf_actors import AsyncWork, Channel, Worker
from rlinf_actors.cli.app import app
from rlinf_actors.testing import LocalCluster

pytestmark = pytest.mark.live

CONF = "cluster: {num_nodes: 1, component_placement: {actor: 0}}"

ASKING: Mapping[str, str | None] = {
    "channel list": "A channel",
    "channel show gold": "A channel",
    "doctor --no-paths": "A diagnosis",
    "events": "An event",
    "group list": "A group",
    "groups": "A group",
    "hw scan": "The hardware of a machine",
    "job list": "A job",
    "job show cell": "A job",
    "logs miners": "A line of output",
    "node show node0": "A shown node",
    "nodes": "A node",
    "paths": "A path",
    "plan CONF": "A plan",
    "stack miners": "A report of stacks",
    "status": "The status",
    "top --once": "The figures",
    "units print": None,
    "worker show miners:0": "A shown worker",
    "workers": "A worker",
}
"""The verbs, and the section of docs/reference/json.md that has the keys of their objects; None without --json."""
OTHERS = {
    "attach", "completion", "dropin", "estop", "group stop", "group list stop", "groups stop", "head", "head stop",
    "job stop", "keys enroll", "keys init", "keys join", "keys list", "keys revoke", "keys rotate", "keys trust",
    "node drain", "node undrain", "run", "serve", "trace fetch", "trace start", "trace stop", "units install",
    "units uninstall", "worker kill",
}  # fmt: skip
"""Verbs that change something, that go on, or that need keys, a debugger or another program: they have own tests."""
RUN = """
import json, sys
from rlinf_actors.cli import app
for verb in json.loads(sys.argv[1]):
    code = app.run(verb)
    sys.stdout.flush()
    sys.stderr.flush()
    print("\\nEND", code, flush=True)
"""


class Miner(Worker):
    def dig(self) -> None:
        print("gold", flush=True)
        self.waits = waiting_get(Channel.connect("gold"))


def waiting_get(channel: Channel[int]) -> AsyncWork[int]:
    waits = channel.get("empty", async_op=True)
    channel.qsize("empty")  # the host has the get when it answers this later request
    return waits


class Said(NamedTuple):
    out: str
    code: int


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of commands for a cluster with a job, a group and a channel, and the file CONF."""
    conf = tmp_path_factory.mktemp("conf") / "conf.yaml"
    conf.write_text(CONF)
    hardware = {"accelerators": 1, "model": "A800"}
    with LocalCluster(num_nodes=1, hardware=hardware) as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.driver_env.items():
            patch.setenv(name, value)
        cluster = made.cluster(namespace="cell")
        channel = Channel.create("gold")
        channel.put(1, key="k")
        Miner.create_group().launch(cluster, name="miners").dig().wait()
        waits = waiting_get(channel)
        yield {**os.environ, "CONF": str(conf)}
        channel.put(1, key="empty")
        channel.put(2, key="empty")
        waits.wait()


def verbs(env: Mapping[str, str], *more: str, names: list[str]) -> list[list[str]]:
    return [[env["CONF"] if word == "CONF" else word for word in name.split()] + [*more] for name in names]


def parts(names: list[str], out: str) -> dict[str, Said]:
    texts = re.split(r"\nEND (\d+)\n", out.replace("\r\n", "\n"))
    assert len(texts) == 2 * len(names) + 1, out[-3000:]
    return {name: Said(texts[2 * at], int(texts[2 * at + 1])) for at, name in enumerate(names)}


def piped(env: Mapping[str, str], names: list[str], *more: str) -> tuple[dict[str, Said], str]:
    given = json.dumps(verbs(env, *more, names=names))
    done = subprocess.run(
        [sys.executable, "-c", RUN, given],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**env},
        check=True,
    )
    return parts(names, done.stdout), done.stderr


def test_every_verb_is_in_the_table_or_has_its_own_test():
    found = set()

    def walk(command: click.Command, path: tuple[str, ...], context: click.Context) -> None:
        if not isinstance(command, click.Group):
            found.add(" ".join(path))
            return
        if command.invoke_without_command:
            found.add(" ".join(path))
        for name in command.list_commands(context):
            one = command.get_command(context, name)
            assert one is not None
            walk(one, (*path, name), context)

    walk(app, (), click.Context(app))
    asking = {name for name in found if any(f"{verb} ".startswith(f"{name} ") for verb in ASKING)}
    assert found - asking == OTHERS


def test_piped_output_has_no_escape_sequence(local):
    said, errors = piped(local, list(ASKING))
    assert {name: one.code for name, one in said.items() if one.code} == {}, errors
    assert "\x1b" not in errors
    for name, one in said.items():
        assert "\x1b" not in one.out, name
        assert one.out.strip(), name
    waiting = next(line for line in said["channel show gold"].out.splitlines() if "miners:0" in line)
    assert "miners:0, " in waiting
    assert f"(pid {os.getpid()} on " in waiting


@pytest.mark.parametrize(("variable", "names"), [("NO_COLOR=1", list(ASKING)), ("TERM=dumb", ["status", "nodes"])])
def test_a_terminal_that_wants_no_escape_sequences_gets_none(local, variable, names):
    given = json.dumps(verbs(local, names=names))
    with terminal(variable, sys.executable, "-c", RUN, given, command=["env"]) as shown:
        assert shown.end() == 0, shown.shown
    for name, one in parts(names, shown.shown).items():
        assert one.code == 0, one.out
        assert "\x1b" not in one.out, name
        assert one.out.strip(), name


def test_json_has_the_keys_of_the_page(local):
    names = [name for name, title in ASKING.items() if title is not None]
    said, errors = piped(local, names, "--json")
    for name, one in said.items():
        assert one.code == 0, (name, errors)
        by_line = name.split()[0] in ("events", "logs")
        found: Any = [json.loads(line) for line in one.out.splitlines()] if by_line else json.loads(one.out)
        objects = found if isinstance(found, list) else [found]
        assert objects, name
        for each in objects:
            assert sorted(each) == sorted(keys_of(ASKING[name])), name
