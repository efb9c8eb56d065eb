"""Start template processes through the keeper. Loop thread only; nothing here blocks.

A private cluster's agentd orders its first template here before it has probed the node, while the rest of agentd is
still being imported; agentd.templates orders all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import msgspec

from agentd import keeper, launch_plan
from agentd.config_fields import Config
from agentd.keeper_client import KeeperClient, Started
from agentd.launch_plan import Site, TemplateKey
from agentd.run_dir import make_directories, remove_template_files
from agentd.users import User, Users
from rlinf_actors import procfs
from rlinf_actors.cgroups.roots import Roots
from rlinf_actors.net import budget_memory, fault_injection
from rlinf_actors.version import VERSION

log = logging.getLogger(__name__)


class TemplateSettings(msgspec.Struct, frozen=True):
    """The settings that all templates of a node share."""

    node: str  # name of the node, for error messages
    run_dir: Path
    cgroups: Roots  # directories in which workers' cgroups are made
    log_bytes: int  # size at which a worker's log file is rotated; 0 for never
    entry: str = launch_plan.ENTRY  # module:function that runs a worker
    keep_s: float | None = None  # seconds for which templates wait for the next agentd; None if they end with this one
    users: Users = msgspec.field(default_factory=Users.of_agentd)  # the users as whom templates run


class OrderedTemplate(msgspec.Struct, frozen=True):
    """A template that the keeper was asked to start. `settings` is a hash of the settings that the template gets."""

    key: TemplateKey
    socket: socket.socket  # connected to the template
    stem: str  # path of the template's files without suffix
    starting: asyncio.Future[Started]
    settings: str
    listens: str  # path of the unix socket at which a later agentd adopts it
    user: User | None = None  # as whom it runs; None for agentd's own user


class TemplateStarter:
    """Orders templates from the keeper.

    Args:
        keeper: starts the processes.
        settings: what all templates share.
        owner_pid: driver whose end ends every template; None without one.

    Attributes:
        keep_s: seconds for which a template waits for the next agentd; None if it ends with this one.
        settings: hash of the settings that a template gets.

    Raises:
        ProcessLookupError: the driver has ended already.
    """

    def __init__(self, keeper: KeeperClient, settings: TemplateSettings, owner_pid: int | None) -> None:
        self.keeper = keeper
        self.keep_s = settings.keep_s
        self._of = settings
        self._owner = procfs.pidfd_of(owner_pid) if owner_pid is not None else -1
        self._numbers = count(1)
        self._budgets: dict[str, budget_memory.Place] = {}  # by user
        self._pkg = make_directories(settings.run_dir)
        self._shared = {"cgroups": settings.cgroups, "log_bytes": settings.log_bytes}
        told = msgspec.json.encode((VERSION, settings.entry, self._shared))
        self.settings = hashlib.sha256(told).hexdigest()[:32]

    @classmethod
    def of_site(cls, loop: asyncio.AbstractEventLoop, site: Site) -> TemplateStarter:
        """Return a starter for the node of *site*, with a keeper client of its own."""
        rules = site.rules
        settings = TemplateSettings(
            rules.node, site.run_dir, rules.cgroups, rules.log_bytes, site.entry, site.keep_s, site.users
        )
        keeper = KeeperClient(loop, site.run_dir, site.keep_s is not None, site.keeper)
        return cls(keeper, settings, site.owner_pid)

    def order(self, key: TemplateKey, node_env: Mapping[str, str]) -> OrderedTemplate:
        """Ask the keeper for a template for *key* in the environment *node_env*. Do not wait for the answer.

        Raise OSError if the keeper cannot be reached, and ConfigError if the key's user cannot be used.
        """
        stem = self._new_stem()
        user = self._of.users.named(key.user)
        listens = f"{stem}.sock" if user is None else f"{user.run_dir}/t/{os.path.basename(stem)}.sock"
        pkg = self._pkg if user is None else self._of.users.import_path
        shared = self._shared if user is None else {"log_bytes": self._of.log_bytes}
        config: dict[str, object] = {
            **shared,
            "owner": keeper.OWNER if self._owner >= 0 else -1,
            "entry": self._of.entry,
            "slot": launch_plan.SLOT,
            "preload": key.preload,
        }
        if self.keep_s is not None:
            config |= {"keep": listens, "keep_s": self.keep_s}
        if key.user not in self._budgets:
            self._budgets[key.user] = budget_memory.make()
        pid, memory, device, inode = self._budgets[key.user]
        if pid:
            config["budgets"] = (keeper.OWNER + (self._owner >= 0), device, inode)
        text = msgspec.json.encode(config).decode()
        command = [key.interpreter, "-c", launch_plan.BOOTSTRAP, pkg, str(keeper.CONTROL), self._of.node, text]
        env = launch_plan.template_environment(key, node_env)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            stack.callback(remove_template_files, stem)
            with theirs, open(f"{stem}.err", "wb") as err:
                if fault_injection.active is not None:
                    fault_injection.active.start("spawn.template", key.interpreter)
                fds = [theirs.fileno(), err.fileno(), *([self._owner] * (self._owner >= 0)), *([memory] * bool(pid))]
                starting = self.keeper.start(command, env, fds, user.start_order() if user is not None else None)
            stack.pop_all()
        return OrderedTemplate(key, ours, stem, starting, self.settings, listens, user)

    async def abort(self, ordered: OrderedTemplate) -> None:
        """End *ordered*, which no pool has taken over, and the keeper. Wait for the keeper's end."""
        ordered.socket.close()
        await self.keeper.close()
        remove_template_files(ordered.stem)
        self.close()

    def close(self) -> None:
        """Release the descriptors of the driver and of the memory for bandwidth groups. Idempotent."""
        for pid, memory, _, _ in self._budgets.values():
            if pid:
                os.close(memory)
        self._budgets.clear()
        if self._owner >= 0:
            os.close(self._owner)
            self._owner = -1

    def _new_stem(self) -> str:
        """Return the path, without suffix, of the files of a new template. No template of an earlier agentd has files
        at that path.
        """
        this = procfs.stat_of(os.getpid())
        while True:
            stem = f"{self._of.run_dir}/t/{this.pid}-{this.started}-{next(self._numbers)}"
            if not os.path.exists(f"{stem}.err"):
                return stem


def order_first(
    config: Config, run_dir: str, node_env: Mapping[str, str]
) -> tuple[TemplateStarter, OrderedTemplate] | None:
    """Order a template that imports the modules `config.prestart`, before anything else is known of the node.

    Return the starter and the template, or None if the keeper cannot be reached.

    Raises:
        ConfigError: the configured cgroup directory cannot be used.
    """
    assert config.prestart is not None
    path, log_bytes = Path(run_dir), int(config.log_max_mb * 2**20)
    settings = TemplateSettings(config.name or os.uname().nodename, path, launch_plan.find_roots(config, ""), log_bytes)
    client = KeeperClient(asyncio.get_running_loop(), path, keep=False)
    starter = TemplateStarter(client, settings, config.owner_pid)
    try:
        return starter, starter.order(launch_plan.template_key(sys.executable, node_env, config.prestart), node_env)
    except OSError as error:  # the first launch tries again, and reports it
        log.warning("no template was started ahead of need: %s", error)
        starter.close()
        return None
