"""`rlinf-actors head`: the coordinator alone, on a machine that runs no workers."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass

import click
from msgspec.structs import replace

from rlinf_actors.cli.output import json_option, show_json
from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.head.commands import Timing
from rlinf_actors.head.keys import OwnKeys
from rlinf_actors.head.ownkeys import own_keys
from rlinf_actors.head.server import HeadServer
from rlinf_actors.head.store import Store
from rlinf_actors.net import discovery, faultpoints
from rlinf_actors.net.address import endpoint_of
from rlinf_actors.net.loop import end_on_internal_error, end_process
from rlinf_actors.net.security import Security, key_at
from rlinf_actors.settings import LISTEN, Settings, Unit
from rlinf_actors.systemd.journal import Voice
from rlinf_actors.systemd.notify import Manager
from rlinf_actors.wire.spawn import ROBOT_END_S

log = logging.getLogger(__name__)

DEFAULT = "127.0.0.1:6380"


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=f"Where to listen; port 0: any. Default: {LISTEN}, else {DEFAULT}.",
)
@click.option(
    "--insecure-test-network", is_flag=True, help="Listen outside loopback without keys. Closed test networks only."
)
@click.option(
    "--state-dir",
    metavar="DIR",
    help="What it must know after a restart. Default: one per port; none for port 0.",
)
@json_option
def head(listen: str | None, insecure_test_network: bool, state_dir: str | None, as_json: bool) -> None:
    """Run a head without an agent, until SIGTERM or Ctrl-C. Nodes join it by `agentd --connect HOST:PORT`."""
    unit = Unit.load()
    Voice("rlinf-actors head", sys.stderr, unit.journal_stream).set_up_logging()
    settings = Settings.load()
    where, said_by = (listen, "--listen") if listen else (settings.listen or DEFAULT, LISTEN)
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"is {where!r}; it must be HOST:PORT, e.g. {DEFAULT}", path=said_by)
    faultpoints.load(settings.faults)
    insecure = insecure_test_network or settings.insecure_test_network
    directory = state_dir or settings.state_dir or _default_state_dir(settings, int(port))
    endpoint = endpoint_of(where, said_by)
    key = key_at(endpoint, settings, "head", insecure=insecure)
    known_by = (key.path if key is not None else "", key.server if key is not None else "", insecure)
    protected = Protected(Security.of(key, insecure), own_keys(key, settings), known_by)
    manager = Manager(unit.notify_socket, unit.watchdog_s)
    try:
        asyncio.run(_serve(endpoint, protected, directory, as_json, manager))
    except (RlinfActorsError, OSError):
        raise
    except Exception:  # noqa: BLE001 - a bug of ours
        traceback.print_exc()
        end_process()


@dataclass(frozen=True)
class Protected:
    """How the head's socket is protected, and whom it lets in from the start.

    Attributes:
        security: of its socket.
        keys: that it lets in.
        known_by: the same for its record: path of the key file, its public key, and whether it takes no keys.
    """

    security: Security
    keys: OwnKeys
    known_by: tuple[str, str, bool]


def _default_state_dir(settings: Settings, port: int) -> str | None:
    """None for a port that nobody can know before: such a head cannot be started again for the same nodes."""
    if not port:
        return None
    parent = settings.run_dir or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return os.path.join(parent, f"rlinf-actors-head-{os.getuid()}-{port}")


async def _serve(endpoint: str, protected: Protected, state_dir: str | None, as_json: bool, manager: Manager) -> None:
    from rlinf_actors.net.transport import ZmqNetwork
    from rlinf_actors.scarce import raise_file_limit

    loop = asyncio.get_running_loop()
    end_on_internal_error(loop)
    ended: asyncio.Future[str] = loop.create_future()

    def end(reason: str) -> None:
        if not ended.done():
            manager.stopping(f"stopping: {reason}")
            ended.set_result(reason)

    faulthandler.enable(2)  # a crash in C code, and the watchdog's SIGABRT to a loop that stands still, say where
    with contextlib.ExitStack() as stack:
        watchdog = manager.watch(loop)
        if watchdog is not None:
            stack.callback(watchdog.close)
        raise_file_limit()
        network = ZmqNetwork(loop, protected.security)
        stack.callback(network.close)
        timing = Timing()
        server = HeadServer(
            network,
            timing=replace(timing, robot_settle_s=timing.robot_lease_s + ROBOT_END_S),
            store=Store(state_dir) if state_dir is not None else None,
            own=protected.keys,
            on_end=end,
        )
        bound = server.start([endpoint])
        address = bound[0].removeprefix("tcp://")
        record = discovery.Record(
            "head", os.getpid(), time.time(), bound, discovery.script_of(os.getpid()), *protected.known_by
        )
        stack.callback(discovery.leave(record, Settings.load(), Unit.load().run_dir))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number.name)
        loop.add_signal_handler(signal.SIGHUP, _nothing_to_read)
        if as_json:
            show_json({"head": address})
        else:
            click.echo(address)
        log.info("the head listens on %s; nodes join by: agentd --connect %s", address, address)
        manager.ready(f"listens on {address}")
        reason = await ended
        server.close(f"the head was stopped ({reason})")


def _nothing_to_read() -> None:
    log.warning("SIGHUP: the head has no file to read again; its options and variables need a restart")
