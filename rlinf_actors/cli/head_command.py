"""`rlinf-actors head`: run a head on a machine without workers. `rlinf-actors head stop`: end a cluster.

rlinf-head.service runs `rlinf-actors head`. The process has one event loop; SIGTERM and SIGINT end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import click
import msgspec
from msgspec.structs import replace

from rlinf_actors.cli.output import confirm, json_option, note, show, show_json, show_table, yes_option
from rlinf_actors.cli.queries import ask_head, head_option, status_of
from rlinf_actors.cli.run import program as run_program
from rlinf_actors.cli.views import ending
from rlinf_actors.errors import ConfigError, RlinfActorsError, UsageError
from rlinf_actors.exit_codes import STOPPED, SUCCESS
from rlinf_actors.head import state_place
from rlinf_actors.head.commands import Timing
from rlinf_actors.head.notify import DEFAULT_FILE, Notify
from rlinf_actors.head.notify import read as read_notify
from rlinf_actors.head.server import HeadServer
from rlinf_actors.head.shell_files import open_files
from rlinf_actors.head.store import own_keys
from rlinf_actors.model.run_order import HeadOrder
from rlinf_actors.net import fault_injection, head_records
from rlinf_actors.net.daemon import ends_process, on_stop_signals, run_daemon
from rlinf_actors.net.host import endpoint_of, split_address
from rlinf_actors.net.socket_security import Security, key_at
from rlinf_actors.plurals import counted
from rlinf_actors.procfs import forbid_dumps, set_name
from rlinf_actors.security.keyfile import KeyFile, who
from rlinf_actors.settings import LISTEN, Settings, Unit
from rlinf_actors.systemd.service_manager import DaemonStderr, Manager
from rlinf_actors.wire.client_messages import Done, StopCluster
from rlinf_actors.wire.template_protocol import ROBOT_GONE_S

log = logging.getLogger(__name__)

DEFAULT = "127.0.0.1:6380"
STOP_S = 30.0
"""Seconds that groups may take to end. On a silent node this takes the lease plus the grace period after SIGTERM."""


@click.group(invoke_without_command=True)
@click.option(
    "--listen", metavar="HOST:PORT", help=f"Address to listen on; port 0: any. Default: {LISTEN}, else {DEFAULT}."
)
@click.option(
    "--insecure-test-network", is_flag=True, help="Listen outside loopback without keys. Closed test networks only."
)
@click.option(
    "--state-dir",
    metavar="DIR",
    help="Directory for what a restarted head must know. Default: one per port below $XDG_STATE_HOME/rlinf-actors, "
    "else /var/lib/rlinf-actors (root) or ~/.local/state/rlinf-actors; none for port 0.",
)
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help=f"TOML file with the table [notify]: what to run for which events. Default: {DEFAULT_FILE}, if it exists.",
)
@click.option(
    "--of-run", is_flag=True, hidden=True, help="Belong to `rlinf-actors run`, which writes a HeadOrder to stdin."
)
@json_option
@click.pass_context
def head(
    context: click.Context,
    listen: str | None,
    insecure_test_network: bool,
    state_dir: str | None,
    config_file: str | None,
    of_run: bool,
    as_json: bool,
) -> None:
    """Run a head without an agentd, until SIGTERM or Ctrl-C. Nodes join it by `agentd --connect HOST:PORT`.

    Jobs continue after the head has ended, and wait for a head at the same address with the same state directory.
    `rlinf-actors head stop` ends the cluster.
    """
    if context.invoked_subcommand is not None:
        return
    unit = Unit.load()
    set_name("rlinf-head")
    forbid_dumps()  # before the key is read
    DaemonStderr("rlinf-actors head", sys.stderr, unit.journal_stream).set_up_logging()
    settings = Settings.load()
    where, said_by = (listen, "--listen") if listen else (settings.listen or DEFAULT, LISTEN)
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"is {where!r}; it must be HOST:PORT, e.g. {DEFAULT}", path=said_by)
    notify = read_notify(config_file)
    fault_injection.load(settings.faults)
    insecure = insecure_test_network or settings.insecure_test_network
    given = state_dir or settings.state_dir
    directory = state_place.named(given) if given else _default_state_dir(int(port))
    endpoint = endpoint_of(where, said_by)
    key = key_at(endpoint, settings, "head", insecure=insecure)
    order = _order() if of_run else None
    manager = Manager(unit.notify_socket, unit.watchdog_s)
    with ends_process(RlinfActorsError, OSError):
        code = run_daemon(lambda: _serve(endpoint, key, insecure, directory, notify, as_json, manager, order))
    context.exit(code)


@head.command()
@click.option("--reason", default="", metavar="TEXT", help="Shown to drivers.")
@yes_option
@head_option
@json_option
def stop(reason: str, yes: bool, head: str | None, as_json: bool) -> None:
    """End a cluster: all groups of all jobs, then the head. Each agentd runs on and waits for another head.

    Administrators only. Keys, ranks of nodes and emergency stops stay in the state directory. If you want to restart a
    head, end its process by SIGTERM instead, so that jobs continue.
    """
    endpoint, status = status_of(head)
    groups = [
        {"namespace": group.namespace, "group": group.name, "workers": len(group.workers)} for group in status.groups
    ]
    if not as_json:
        show_table(
            ("GROUP", "JOB", "WORKERS"),
            [(group["group"], group["namespace"], group["workers"]) for group in groups],
            "no group is running",
        )
    does = f"ends the cluster at {endpoint}, with {counted(len(groups), 'group')}"
    confirm(yes, does, f"End {'these and ' if groups else ''}the head at {endpoint}?", can_ask=not as_json)
    ask_head(endpoint, StopCluster(by=who(), reason=reason), Done, STOP_S, partial(ending, status.groups))
    if as_json:
        show_json({"head": endpoint, "groups": groups})
    note(f"the cluster at {endpoint} has ended")


def _default_state_dir(port: int) -> str | None:
    """Return the state directory of a head that was started without --state-dir. Return None if *port* is 0, because
    such a head has another port after a restart, so its state would not be found.
    """
    if not port:
        return None
    return state_place.default_state_dir(f"head-{port}", os.environ)


class _Ordered(NamedTuple):
    order: HeadOrder
    is_over: bool  # the run has said already that it ends by itself


def _order() -> _Ordered:
    text = b""
    while b"\n" not in text and (chunk := os.read(0, 1 << 16)):
        text += chunk
    line, _, more = text.partition(b"\n")
    try:
        return _Ordered(msgspec.json.decode(line, type=HeadOrder), bool(more))
    except msgspec.DecodeError as error:
        raise UsageError(f"--of-run is for `rlinf-actors run`, and stdin has none of its orders: {error}") from None


def _end_with_run(
    loop: asyncio.AbstractEventLoop, ordered: _Ordered, end: Callable[[], None], stack: contextlib.ExitStack
) -> None:
    """Call *end* when the pipe at stdin closes, because the run has ended. If the run was killed, end its program and
    remove its directory: a run that ends by itself does both, and says so by one line before it closes the
    pipe.
    """
    order, ended_itself = ordered

    def readable() -> None:
        nonlocal ended_itself
        if os.read(0, 1024):
            ended_itself = True
            return
        loop.remove_reader(0)
        if not ended_itself:
            run_program.end(order.run)  # blocks the loop: nothing else is left to do
            shutil.rmtree(order.run_dir, ignore_errors=True)
        end()

    loop.add_reader(0, readable)
    stack.callback(loop.remove_reader, 0)


async def _serve(
    endpoint: str,
    key: KeyFile | None,
    insecure: bool,
    state_dir: str | None,
    notify: Notify,
    as_json: bool,
    manager: Manager,
    order: _Ordered | None,
) -> int:
    """Run a head that listens at *endpoint* until the head ends. Return the exit code.

    *key* is the head's key file, or None. *insecure* permits TCP without keys. The
    head reports to *manager* (systemd) when it is ready and when it stops. *order* is that of the `rlinf-actors run`
    that owns this head, None without one.
    """
    from rlinf_actors.net.zmq_network import ZmqNetwork

    settings, loop = Settings.load(), asyncio.get_running_loop()
    own = own_keys(key, settings)
    if order is not None:
        own = replace(own, nodes=order.order.nodes)
    ended: asyncio.Future[tuple[str, bool]] = loop.create_future()

    def end(reason: str, for_good: bool) -> None:
        if not ended.done():
            manager.stopping(f"stopping: {reason}")
            ended.set_result((reason, for_good))

    with contextlib.ExitStack() as stack:
        watchdog = manager.watch(loop)
        if watchdog is not None:
            stack.callback(watchdog.close)
        network = ZmqNetwork(loop, Security.of(key, insecure))
        stack.callback(network.close)
        timing = Timing()
        files = open_files(state_dir, notify, os.environ)
        server = HeadServer(
            network,
            timing=replace(timing, robot_settle_s=timing.robot_lease_s + ROBOT_GONE_S),
            store=files.store,
            events=files.events,
            hooks=files.hooks,
            audit=files.audit,
            own=own,
            on_end=lambda reason: end(reason, True),
        )
        local = [] if order is None else [f"ipc://{order.order.run_dir}/{head_records.SOCKET}"]  # needs no key
        bound = server.start([*local, endpoint])
        listens = bound[-1]
        address = listens.removeprefix("tcp://")
        script = f"run: {order.order.program}" if order is not None else head_records.script_of(os.getpid())
        key_path, public = (key.path, key.server) if key is not None else ("", "")
        record = head_records.HeadRecord("head", os.getpid(), time.time(), bound, script, key_path, public, insecure)
        stack.callback(head_records.publish(record, settings, Unit.load().run_dir))
        on_stop_signals(loop, lambda name: end(name, False))
        if order is not None:
            _end_with_run(loop, order, lambda: end("its `rlinf-actors run` has ended", True), stack)
        nothing = "SIGHUP: the head reloads nothing; restart it to change its options, variables and configuration"
        loop.add_signal_handler(signal.SIGHUP, log.warning, nothing)
        show(as_json, {"head": address}, address)
        host, port = split_address(address, "--listen") if listens.startswith("tcp://") else ("", 0)
        everywhere = host in ("0.0.0.0", "::")
        there = f"HOST:{port}, with a name or address of this machine as HOST" if everywhere else address
        log.info("the head listens on %s; nodes join by: agentd --connect %s", address, there)
        manager.ready(f"listens on {address}")
        reason, for_good = await ended
        if state_dir is not None and not for_good:
            text = "%s: jobs continue, and wait for a head at %s with the state in %s"
            log.info(text, reason, address, state_dir)
            server.close(f"the head was stopped ({reason})", restarting=True)
            return 0
        if not for_good:
            log.warning("%s: the cluster ends, because no other head can continue without a state directory", reason)
        server.close(f"the head was stopped ({reason})")
        return STOPPED if for_good else SUCCESS
