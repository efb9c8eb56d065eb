"""Every verb, in a terminal and piped, and those that ask with --json, against one living cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from terminal import COMMAND, terminal
from test_json_page import keys_of

from rlinf_actors import AsyncWork, Channel, NodePlacementStrategy, Worker
from rlinf_actors.cli import app as main
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
CHANGING = (
    "completion bash",
    "node drain node0",
    "node undrain node0",
    "trace start --job cell",
    "trace stop --job cell",
    "trace fetch --job cell -o TRACE",
    "worker kill MODE:0 --yes",
    "group stop MODE --yes",
)
"""Verbs that change the cluster, in the order in which they are run. MODE is a group."""
MODES = ("terminal", "pipe")
FILES = (
    "keys init --name kim",
    "keys enroll n1 --file KEY --state-dir STATE",
    "keys list --state-dir STATE",
    "keys revoke n1 --state-dir STATE",
    "keys trust 3[$uiMpVZcRA4k>3q3BU!Mk&E9=H2Q}Yb)nZnXbK",
    "units install --dir UNITS",
    "units uninstall --dir UNITS --yes",
    "dropin --check CONF",
)
"""Verbs that change or read files only, such as the keys of a head that does not run."""
OTHERS = {
    "attach": "talks to a debugger: test_attach_command.py test_terminal_detaches_and_is_told_of_the_workers_death",
    "estop": "is no verb of click: test_estop_button.py test_enter_on_a_terminal_stops_and_control_d_disarms",
    "group list stop": "is `group stop`: test_groups_command.py test_a_group_is_ended_by_its_name",
    "groups stop": "is `group stop`: test_groups_command.py test_a_group_is_ended_by_its_name",
    "head": "goes on: test_every_verb.py test_a_head_with_keys_in_narrow_terminals",
    "head stop": "ends the cluster: test_every_verb.py test_a_head_with_keys_in_narrow_terminals",
    "job stop": "ends the job: test_job_command.py test_a_job_is_shown_and_ended_while_its_driver_goes_on",
    "keys join": "needs a head with keys: test_every_verb.py test_a_head_with_keys_in_narrow_terminals",
    "keys rotate": "needs a head with keys: test_every_verb.py test_a_head_with_keys_in_narrow_terminals",
    "run": "runs another program: test_run_command.py test_ctrl_c_reaches_the_program_once",
    "serve": "goes on: test_every_verb.py test_a_head_with_keys_in_narrow_terminals",
}
"""Why other verbs are not in these tables, and the test that runs each in a terminal."""
TERMINALS = ("terminal(", "openpty(")
"""What a test calls that runs a verb in a terminal."""
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
        for mode in MODES:
            Miner.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name=mode)
        waits = waiting_get(channel)
        yield {**os.environ, "CONF": str(conf)}
        channel.put(1, key="empty")
        channel.put(2, key="empty")
        waits.wait()


GIVEN = ("CONF", "MODE", "KEY", "STATE", "TRACE", "UNITS")
"""Words of verbs that stand for values of this process's environment."""


def verbs(env: Mapping[str, str], *more: str, names: list[str]) -> list[list[str]]:
    given = re.compile(rf"\b({'|'.join(GIVEN)})\b")
    return [[given.sub(lambda at: env[at[0]], word) for word in name.split()] + [*more] for name in names]


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
    run = {name for name in found if any(f"{verb} ".startswith(f"{name} ") for verb in (*ASKING, *CHANGING, *FILES))}
    assert found - run == set(OTHERS)
    for verb, why in OTHERS.items():
        file, test = why.split(": ")[1].split()
        body = (Path(__file__).parent / file).read_text().partition(f"def {test}(")[2].partition("\ndef ")[0]
        assert any(called in body for called in TERMINALS), verb


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


@pytest.mark.parametrize("mode", MODES)
def test_what_changes_something_says_it_in_a_terminal_and_piped(local, tmp_path, mode):
    files = {"KEY": "n1.key", "STATE": "state", "TRACE": "trace.json", "UNITS": "units"}
    env = {**local, **{name: f"{tmp_path}/{file}" for name, file in files.items()}, "MODE": mode, "NO_COLOR": "1"}
    for names, more in ((CHANGING, {}), (FILES, {"RLINF_ACTORS_KEYS": f"{tmp_path}/keys"})):
        given = json.dumps(verbs(env, names=[*names]))
        command = [sys.executable, "-c", RUN, given]
        if mode == "pipe":
            said, errors = piped({**env, **more}, [*names])
        else:
            variables = [f"{name}={value}" for name, value in {**env, **more}.items()]
            with terminal(*variables, *command, command=["env"]) as shown:
                assert shown.end() == 0, shown.shown
            said, errors = parts([*names], shown.shown), ""
        assert {name: one.code for name, one in said.items() if one.code} == {}, errors
        for name, one in said.items():
            assert "\x1b" not in one.out + errors, name
            assert one.out.strip() or errors, name


def test_a_head_with_keys_in_narrow_terminals(tmp_path, monkeypatch, capsys):
    for name in ("RLINF_HEAD", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"KEYS": "keys", "RUN_DIR": "run"}.items():
        monkeypatch.setenv(f"RLINF_ACTORS_{name}", str(tmp_path / value))
    assert main.run(["keys", "init", "--name", "kim"]) == 0
    narrow = ("COLUMNS=40", "NO_COLOR=1", *COMMAND)
    with terminal(
        *narrow, "head", "--listen", "127.0.0.1:0", "--state-dir", f"{tmp_path}/state", command=["env"]
    ) as head:
        head.until("; nodes join by: ")
        address = re.findall(r"the head listens on (\S+);", head.shown)[0]
        capsys.readouterr()
        assert main.run(["keys", "enroll", "n2", "--head", address, "--json"]) == 0
        token = json.loads(capsys.readouterr().out)["token"]
        assert main.run(["keys", "enroll", "n3", "--head", address, "--viewer", "--file", f"{tmp_path}/n3.key"]) == 0
        asked = json.dumps([
            ["keys", "join", token, "--dir", f"{tmp_path}/n2"],
            ["keys", "rotate", "--dir", f"{tmp_path}/n2", "--head", address],
            ["keys", "list", "--head", address],
            ["keys", "enroll", "n4", "--head", address],
        ])  # fmt: skip
        with terminal(*narrow[:2], sys.executable, "-c", RUN, asked, command=["env"]) as shown:
            assert shown.end() == 0, shown.shown
        joined, rotated, listed, enrolled = parts(["join", "rotate", "list", "enroll"], shown.shown).values()
        assert "n2 is listed; start it:\n" in joined.out
        assert "the old key is valid for 24 h" in rotated.out
        assert re.search(r"^NAME +n2\n(.+\n)*STATE +retiring\n(.+\n)*\nNAME +n2\n", listed.out, re.M), listed.out
        assert enrolled.out.count("rlinf-join-") == 1, "the command has the token"
        (tmp_path / "n3").mkdir(mode=0o700)
        (tmp_path / "n3.key").rename(tmp_path / "n3" / "viewer.key")
        of_viewer = f"RLINF_ACTORS_KEYS={tmp_path}/n3"
        with terminal(
            of_viewer, *narrow, "serve", "--listen", "127.0.0.1:0", "--head", address, command=["env"]
        ) as page:
            page.until("Ctrl-C ends it")
            assert "/?token=" in page.shown
            assert "this server asks the head at " in page.shown
            page.type("\x03")
            assert page.end() == 0, page.shown
        with terminal(*narrow, "head", "stop", "--head", address, command=["env"]) as stop:
            stop.until(f"End the head at tcp://{address}? [y/N]: ")
            stop.type("y\n")
            assert stop.end() == 0, stop.shown
        assert "has ended" in stop.shown
        assert head.end() == 3, head.shown


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
