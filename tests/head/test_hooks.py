"""Hooks of the head: programs that are run and pages that are posted to, with real processes and a real server."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest
from keys_kit import two_jobs

from rlinf_actors.errors import ConfigError
from rlinf_actors.head import hooks, notify
from rlinf_actors.head.event_store import EventStore
from rlinf_actors.head.hooks import Hooks
from rlinf_actors.head.notify import Notify, checked
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.wire.client_messages import EStop, GetEvents, GetStatus
from rlinf_actors.wire.event_values import ClusterEvent, event_dict
from rlinf_actors.wire.hook_values import HookState
from rlinf_actors.wire.values import ExitReport

DIED = ClusterEvent(
    7, 5.0, "worker_died", 'worker g:0 "died"', "n0", namespace="ns", exit=ExitReport("signalled", signal=9)
)


class Made:
    """Hooks, and waiting for what they have done."""

    def __init__(self, told: Notify, waiting: int = 1000) -> None:
        self.hooks = Hooks(
            told, {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": "x"}, asyncio.get_running_loop(), waiting
        )

    def tell(self, *kinds: str) -> None:
        for kind in kinds or ("worker_died",):
            self.hooks.tell(DIED if kind == "worker_died" else ClusterEvent(1, 1.0, kind, ""))

    async def idle(self) -> list[HookState]:
        """Wait until no event waits, and return the states."""
        changed = asyncio.Event()
        for hook in self.hooks._hooks:
            counted = hook._delivered
            hook._delivered = lambda fault, counted=counted: (counted(fault), changed.set())
        while any(state.waiting for state in self.hooks.states()):
            changed.clear()
            await asyncio.wait_for(changed.wait(), 20)
        return self.hooks.states()


@pytest.fixture
def made() -> Iterator[list[Made]]:
    found: list[Made] = []
    yield found
    for one in found:
        one.hooks.close()


def script(folder: Path, text: str) -> str:
    path = folder / "hook"
    path.write_text(f"#!{sys.executable} -I\nimport json, os, sys, time\nhere = {str(folder)!r}\n{text}")
    path.chmod(0o700)
    return str(path)


WRITES = "open(f'{here}/got', 'a').write(json.dumps([sys.argv[1:], json.load(sys.stdin), dict(os.environ)]) + '\\n')\n"


def got(folder: Path) -> list:
    return [json.loads(line) for line in (folder / "got").read_text().splitlines()]


async def test_program_gets_the_event_on_stdin_and_its_words_without_a_shell(tmp_path, made):
    words = (script(tmp_path, WRITES), "$HOME; rm -rf /", "two words")
    made.append(Made(Notify(command=words, kinds=("worker_died", "estop"))))
    made[0].tell("worker_died", "node_lost", "estop", "refused")
    (state,) = await made[0].idle()
    assert state == HookState("command", sent=2)
    (first, event, env), (_, second, _) = got(tmp_path)
    assert (first, event) == (list(words[1:]), event_dict(DIED))
    assert second["kind"] == "estop"
    assert "NOTIFY_SOCKET" not in env


async def test_failing_program_is_logged_once_and_counted(tmp_path, made, caplog):
    bad = "sys.stderr.write('x' * 100000 + '\\x1b[31m no room')\nsys.exit(os.path.exists(f'{here}/bad') and 3)\n"
    (tmp_path / "bad").touch()
    made.append(Made(Notify(command=(script(tmp_path, bad),))))
    made[0].tell()
    made[0].tell()
    (state,) = await made[0].idle()
    assert (state.sent, state.failed) == (0, 2)
    assert state.fault.startswith("it ended with code 3: xxx")
    assert "\x1b" not in state.fault
    (tmp_path / "bad").unlink()
    made[0].tell()
    (state,) = await made[0].idle()
    assert state == HookState("command", sent=1, failed=2)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "works again; 2 events were not delivered" in caplog.records[1].message


async def test_program_that_hangs_is_killed_with_its_children(tmp_path, made, monkeypatch):
    pid, wait, children = tmp_path / "pid", hooks._Hook._wait, []
    os.mkfifo(pid)

    def once_it_has_a_child(hook, stderr, ended, limit):
        begun = time.monotonic()
        children.append(int(pid.read_text()))
        return wait(hook, stderr, ended, limit + time.monotonic() - begun)

    monkeypatch.setattr(hooks._Hook, "_wait", once_it_has_a_child)
    text = "child = os.fork()\nif child:\n    open(f'{here}/pid', 'w').write(str(child))\ntime.sleep(600)\n"
    made.append(Made(Notify(command=(script(tmp_path, text),), timeout_s=1.0)))
    made[0].tell()
    (state,) = await made[0].idle()
    assert state.fault == "it took more than 1 s, and was killed"
    assert await asyncio.to_thread(ended, *children)


async def test_child_that_a_program_leaves_is_ended(tmp_path, made):
    text = "child = os.fork()\nif child:\n    open(f'{here}/pid', 'w').write(str(child))\nelse:\n    time.sleep(600)\n"
    made.append(Made(Notify(command=(script(tmp_path, text),))))
    made[0].tell()
    (state,) = await made[0].idle()
    assert state == HookState("command", sent=1)
    assert await asyncio.to_thread(ended, int((tmp_path / "pid").read_text()))


def ended(pid: int) -> bool:
    """Wait until a process has ended. Return False if it has not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        return bool(poll.poll(10_000))
    finally:
        os.close(fd)


async def test_events_beyond_the_queue_are_dropped_and_counted(tmp_path, made, caplog):
    made.append(Made(Notify(command=(script(tmp_path, ""),)), waiting=3))
    for _ in range(5):
        made[0].tell()  # the loop counts what is done when the test waits
    (state,) = made[0].hooks.states()
    assert (state.waiting, state.dropped) == (3, 2)
    assert len(caplog.records) == 1
    (state,) = await made[0].idle()
    assert state == HookState("command", sent=3, dropped=2)


async def test_head_that_ends_waits_for_no_program_for_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(hooks, "END_S", 0.2)
    one = Made(Notify(command=(script(tmp_path, "time.sleep(600)\n"),), timeout_s=500))
    one.tell()
    one.tell()
    one.hooks.close()
    one.hooks.close()
    assert "the head ended before 2 events were delivered" in caplog.text


# --- pages ---


class _Page(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Authorization"], json.loads(body)))
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[http.server.HTTPServer]:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Page)
    server.got, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def private(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


async def test_page_gets_the_event_and_the_token_and_shows_no_secret(tmp_path, made, page, caplog):
    url = f"http://127.0.0.1:{page.server_port}/secret-path"
    told = Notify(
        webhook_file=private(tmp_path / "url", url + "\n"), token_file=private(tmp_path / "token", "secret-token")
    )
    made.append(Made(checked(told)))
    made[0].tell()
    assert await made[0].idle() == [HookState("webhook", sent=1)]
    assert page.got == [("/secret-path", "Bearer secret-token", event_dict(DIED))]
    for status, text in ((302, "status 302"), (500, "status 500")):  # it follows no redirection
        page.status = status
        made[0].tell()
        (state,) = await made[0].idle()
        assert text in state.fault
    assert len(page.got) == 3
    (tmp_path / "token").chmod(0o644)
    made[0].tell()
    (state,) = await made[0].idle()
    assert "other users can read" in state.fault
    (tmp_path / "token").chmod(0o600)
    private(tmp_path / "url", "http://127.0.0.1:1/secret-path")
    made[0].tell()
    (state,) = await made[0].idle()
    assert state.fault == "the server cannot be reached: Connection refused"
    assert "secret" not in state.fault + caplog.text
    assert state.failed == 4


# --- configuration ---


@pytest.mark.parametrize(
    ("told", "path", "text"),
    [
        (Notify(command=("hook",)), "notify.command", "absolute path"),
        (Notify(command=("/no/such",)), "notify.command", "no program"),
        (Notify(command=("/tmp/no/such",)), "notify.command", "no program .* has a /tmp of its own"),
        (Notify(webhook="ftp://x/y"), "notify.webhook", "https://HOST"),
        (Notify(webhook="http://x:y/"), "notify.webhook", "https://HOST"),
        (Notify(webhook="http://x/\n"), "notify.webhook", "https://HOST"),
        (Notify(webhook="https://me:pass@x/"), "notify.webhook", "password"),
        (Notify(webhook="https://x/", webhook_file="/x"), "notify.webhook", "one"),
        (Notify(token_file="/x"), "notify.token_file", "without webhook"),
        (Notify(webhook="https://x/", token_file="/no/such"), "notify.token_file: /no/such", "No such file"),
        (Notify(timeout_s=0), "notify.timeout_s", "more than 0"),
        (Notify(timeout_s=float("nan")), "notify.timeout_s", "more than 0"),
    ],
)
def test_wrong_configuration_names_the_key(told, path, text):
    with pytest.raises(ConfigError, match=text) as error:
        checked(told)
    assert error.value.path == path
    assert "pass@" not in str(error.value)


@pytest.mark.parametrize(("text", "mode"), [("a", 0o644), ("a", 0o620), ("", 0o600), ("a b", 0o600), ("ä", 0o600)])
def test_file_with_a_secret_is_private_and_has_one_word(tmp_path, text, mode):
    with pytest.raises(ConfigError):
        notify.read_secret(private(tmp_path / "s", text, mode), "notify.token_file")
    assert notify.read_secret(private(tmp_path / "s", " a\n", 0o640), "notify.token_file") == "a"


def test_file_of_the_head_has_one_table(tmp_path):
    path = tmp_path / "head.toml"
    path.write_text('[notify]\ncommand = ["/bin/sh"]\nkinds = ["node_lost"]\n')
    assert notify.read(str(path)) == Notify(command=("/bin/sh",), kinds=("node_lost",))
    for text in ('[notify]\nkinds = ["worker_exploded"]', "[notify]\ncomand = []", "[other]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=str(path)):
            notify.read(str(path))
    with pytest.raises(ConfigError):
        notify.read(str(tmp_path / "none.toml"))


# --- the head ---


async def test_head_tells_its_hooks_of_an_emergency_stop_and_of_its_own_end_which_the_next_head_knows(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(hooks, "END_S", pace.PATIENCE_S)  # two interpreters start
    loop = asyncio.get_running_loop()
    network = ZmqNetwork(loop)
    told = Hooks(Notify((script(tmp_path, WRITES),), kinds=("estop", "head_stopped")), os.environ, loop)
    head = HeadServer(network, hooks=told, events=EventStore(str(tmp_path)))
    endpoint = head.start([f"ipc://{tmp_path}/head"])[0]
    client = ControlClient(network, endpoint, b"observer:x", lambda notice: None)
    await client.request(EStop("me", "smoke"), 10)
    status = await client.request(GetStatus(), 10)
    assert [hook.name for hook in status.hooks] == ["command"]
    following = asyncio.ensure_future(client.request(GetEvents(-1, wait_s=5.0), 10))
    await asyncio.sleep(0)  # it is sent before the next question, so the head has it when that is answered
    await client.request(GetStatus(), 10)
    head.close("the head was stopped (SIGTERM)", restarting=True)
    assert [event.kind for event in (await following).events] == ["head_stopped"]
    client.close()
    network.close()
    (_, event, _), (_, last, _) = got(tmp_path)
    assert (event["kind"], "smoke" in event["text"]) == ("estop", True)
    text = "the head was stopped (SIGTERM); jobs wait for the next head"
    assert (last["kind"], last["text"]) == ("head_stopped", text)
    next_store = EventStore(str(tmp_path))
    assert next_store.remembered.events[-1].event.text == text
    next_store.close()


def test_only_the_administrator_sees_the_hooks():
    kit = two_jobs()
    kit.head.hooks = lambda: [HookState("command")]
    assert [len(kit.ask(peer, GetStatus()).hooks) for peer in ("admin", "ann", "w", "a:n1")] == [1, 0, 0, 0]
