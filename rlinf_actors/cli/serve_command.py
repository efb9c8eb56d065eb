"""The command `rlinf-actors serve`: metrics for Prometheus, and a page that shows the cluster (package `serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlinf_actors.cli.output import Amount, echo, note
from rlinf_actors.cli.queries import find_head, head_option
from rlinf_actors.cli.stack_report import ShownWorker, report_lines
from rlinf_actors.config_files import open_regular
from rlinf_actors.errors import ConfigError, UsageError
from rlinf_actors.installed import install_extra
from rlinf_actors.net import discovery, holders
from rlinf_actors.net.host import joined_address, split_address
from rlinf_actors.net.loop import Tasks, new_event_loop
from rlinf_actors.net.socket_security import Security, is_loopback, is_tcp, key_at
from rlinf_actors.security.keyfile import is_private, locate
from rlinf_actors.settings import Settings

if TYPE_CHECKING:
    from rlinf_actors.sampling.sampler import Sampler

ADDRESS = "127.0.0.1:8270"
MISSING = f"rlinf-actors serve needs the packages of the extra 'web': run '{install_extra('web')}'"
NO_KEY = (
    "this cluster has keys, and there is no viewer's key here. On the head's machine: `rlinf-actors keys enroll NAME "
    "--viewer`; then run here the command that it prints"
)
FILES = {"dashboard": "grafana-dashboard.json", "alerts": "alerts.yml"}
MAX_TOKEN = 4096


@click.command()
@click.option(
    "--listen", "address", default=ADDRESS, show_default=True, metavar="HOST:PORT", help="Port 0: any free one."
)
@click.option(
    "--beyond-loopback", is_flag=True, help="Listen also on an address that other machines reach. Needs --token-file."
)
@click.option("--token-file", metavar="FILE", help="File with the token (20 characters or more) instead of a new one.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="A further name by which browsers reach this server, such as a reverse proxy's. May be repeated.",
)
@click.option("--https", is_flag=True, help="Browsers use https, by a reverse proxy: mark the cookie as secure.")
@click.option(
    "--every", "every_s", type=Amount(min=1.0), default=5.0, show_default=True, metavar="SECONDS",
    help="Time between two polls of the head and the nodes.",
)  # fmt: skip
@click.option(
    "--print",
    "printed",
    type=click.Choice(tuple(FILES)),
    help="Print Grafana's dashboard, or Prometheus' alert rules, and end.",
)
@head_option
def serve(
    address: str,
    beyond_loopback: bool,
    token_file: str | None,
    hosts: Sequence[str],
    https: bool,
    every_s: float,
    printed: str | None,
    head: str | None,
) -> None:
    """Serve metrics for Prometheus (/metrics), and a page that shows the cluster, until Ctrl-C.

    It prints the page's address, which has a secret token. It only asks: with keys it needs a viewer's key,
    except by the unix socket of its own user's head.
    """
    if printed is not None:
        folder = Path(__file__).parent.parent / "serve" / "files"
        echo(folder.joinpath(FILES[printed]).read_text(), nl=False)
        return
    try:
        from rlinf_actors.serve.guard import new_token
    except ModuleNotFoundError as error:
        raise UsageError(f"{MISSING} ({error})") from None
    name, port = split_address(address, "--listen")
    token = _read_token(token_file) if token_file is not None else new_token()
    if not is_loopback(name):
        if not beyond_loopback or token_file is None:
            raise UsageError(
                f"{name} is not loopback: other machines could read what your cluster does. To allow that, give "
                "--beyond-loopback and --token-file, and put a reverse proxy with TLS in front: this server has none"
            )
        note("without TLS everybody on the way reads the pages and the token: let browsers come by a reverse proxy")
    settings = discovery.client_settings()
    endpoint = discovery.local_way(find_head(head, settings), settings)
    security = _security(endpoint, settings)
    with _bound(name, port) as listener:
        url = f"http://{joined_address(name, listener.getsockname()[1])}/"
        loop = new_event_loop()
        try:
            shown = url if token_file is not None else f"{url}?token={token}"
            loop.run_until_complete(_serve(endpoint, security, listener, token, hosts, https, every_s, shown))
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


async def _serve(
    endpoint: str,
    security: Security,
    listener: socket.socket,
    token: str,
    hosts: Sequence[str],
    https: bool,
    every_s: float,
    url: str,
) -> None:
    from rlinf_actors.net.zmq_network import ZmqNetwork

    try:
        from rlinf_actors.serve.app import App, serving
    except ModuleNotFoundError as error:
        raise UsageError(f"{MISSING} ({error})") from None
    from rlinf_actors.sampling.sampler import Sampler
    from rlinf_actors.serve.guard import Guard

    loop, end = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    async with contextlib.AsyncExitStack() as stack:
        network = ZmqNetwork(loop, security)
        stack.callback(network.close)
        sampler = Sampler(network, endpoint, every_s)
        stack.callback(sampler.close)
        guard = Guard(listener.getsockname()[1], token, hosts, secure=https)
        app = App(sampler, guard, _stack_lines)
        sampler.on_sample = partial(_say_why, sampler, sampler.on_sample)
        tasks = Tasks(loop)
        stack.push_async_callback(tasks.close)
        rounds = tasks.start(sampler.run(), "asking the head")
        tasks.start(sampler.run_events(), "waiting for events")
        await stack.enter_async_context(serving(app.make(), listener))
        stack.callback(app.close)
        echo(url)
        note(f"this server asks the head at {endpoint}, and its nodes, for figures every {every_s:g} s; Ctrl-C ends it")
        ending = tasks.start(end.wait(), "waiting for a signal")
        await asyncio.wait({ending, rounds}, return_when=asyncio.FIRST_COMPLETED)


def _say_why(sampler: Sampler, then: Callable[[], object]) -> None:
    """Say on stderr why the first round has failed, as the page does. Later rounds call *then* only."""
    if sampler.board.number:  # else these are events, and the first round goes on
        sampler.on_sample = then
        if fault := sampler.board.sample.fault:
            note(f"the head at {sampler.endpoint} is not reached, and is asked again: {fault}")
    then()


def _stack_lines(worker: object, stacks: object) -> list[str]:
    from rlinf_actors.sampling.sample import WorkerView
    from rlinf_actors.wire.stack_values import WorkerStacks

    assert isinstance(worker, WorkerView)
    assert isinstance(stacks, WorkerStacks)
    group, rank = worker.group, worker.state.rank
    return [*report_lines([ShownWorker(group.namespace, group.name, rank, worker.place, stacks, worker.place)])]


def _read_token(path: str) -> str:
    """Return the token in the file *path*.

    Raises:
        ConfigError: it cannot be read, others can read it, or the token is too short.
    """
    import os

    from rlinf_actors.serve.guard import LEAST_CHARS

    try:
        with open_regular(path) as file:
            info, data = os.fstat(file.fileno()), file.read(MAX_TOKEN)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", path=path) from None
    if not is_private(info.st_mode, info.st_uid, os.geteuid()):
        raise ConfigError(f"others can read it: chmod 600 {path}", path=path)
    token = data.decode(errors="replace").strip()
    if len(token) < LEAST_CHARS or not token.isascii() or not token.isprintable():
        text = f"a token has {LEAST_CHARS} or more printable ASCII characters: head -c 32 /dev/urandom | base64"
        raise ConfigError(text, path=path)
    return token


def _security(endpoint: str, settings: Settings) -> Security:
    """Return the keys of this process: the viewer's, and none of those that may change the cluster."""
    insecure = settings.insecure_test_network
    if not is_tcp(endpoint):
        return Security(insecure)
    key = key_at(endpoint, settings, "viewer", insecure=insecure)
    keyed = key is not None and key.role == "local" and locate(settings, "head") is not None
    if keyed or (key is None and not insecure):
        raise ConfigError(NO_KEY)
    return Security.of(key, insecure)


def _bound(name: str, port: int) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        raise ConfigError(f"{name}:{port}: {error.strerror}", path="--listen") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        in_use = holders.in_use(f"{name}:{port}", error)
        other = f", such as --listen {joined_address(name, 0)}, which takes a free one" if in_use else ""
        raise ConfigError(f"{name}:{port}: {error.strerror}{in_use}{other}", path="--listen") from None
    return listener
