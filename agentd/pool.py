"""The templates of one agentd: one for each kind of worker, started when first needed, a few kept idle."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from itertools import count

import msgspec

from agentd import keeper, launch
from agentd.keeping import Keeping
from agentd.site import Site
from agentd.templates import Process, Record, Template, make_directories, start
from rlinf_actors import procfs
from rlinf_actors.installed import fingerprint
from rlinf_actors.version import VERSION
from rlinf_actors.wire import spawn

log = logging.getLogger(__name__)

MAX_IDLE = 4
"""Templates without workers that are kept for later launches; the one used last stays longest."""


class TemplatePool:
    """All templates of this agent. Loop thread only.

    Args:
        loop: the agent's.
        site: where their workers run.
        keeping: the connection to the keeper, which starts them.
        owner: pidfd of the process whose end is the end of every template, -1 without.
        on_packet, on_end: of each template.

    Attributes:
        running: those whose process is not gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        keeping: Keeping,
        owner: int,
        on_packet: Callable[[Template, spawn.ToAgent], None],
        on_end: Callable[[Template], None],
    ) -> None:
        self.running: set[Template] = set()
        self._loop = loop
        self._site = site
        self._keeping = keeping
        self._owner = owner
        self._keep_s = site.keep_s
        self._on_packet = on_packet
        self._on_end = on_end
        self._by_key: dict[launch.Key, Template] = {}
        self._told_to_end: set[Template] = set()
        self._numbers = count(1)
        self._pkg = make_directories(site.run_dir)
        told = msgspec.json.encode((VERSION, site.entry, self._told()))
        self._settings = hashlib.sha256(told).hexdigest()[:32]

    def get(self, key: launch.Key, node_env: Mapping[str, str]) -> Template:
        """The template of this key; started if there is none.

        Raises:
            OSError: the keeper cannot be asked. Where a template cannot be started, it ends.
        """
        template = self._by_key.pop(key, None)
        if template is None or template.has_ended():
            stem = self._stem()
            owner = keeper.OWNER if self._owner >= 0 else -1
            config = {"owner": owner, "entry": self._site.entry, "slot": launch.SLOT}
            if self._keep_s is not None:
                config |= {"keep": f"{stem}.sock", "keep_s": self._keep_s}
            json = msgspec.json.encode({**config, **self._told(), "preload": key.preload}).decode()
            process = start(
                self._keeping,
                key,
                launch.template_command(key, self._pkg, keeper.CONTROL, self._site.node, json),
                launch.template_environment(key, node_env),
                self._owner,
                stem,
            )
            template = self._made(key, process)
            template.settings, template.kept = self._settings, self._keep_s is not None
        self._by_key[key] = template  # at the end: it was used last
        return template

    def _told(self) -> dict[str, object]:
        """What each template is told of this node's settings."""
        rules = self._site.rules
        return {"cgroups": rules.cgroups, "log_bytes": rules.log_bytes}

    def adopt(self, record: Record, process: Process, inventory: spawn.Inventory) -> Template:
        """Take over a template of an earlier agentd."""
        template = self._made(record.key, process)
        template.ready = True
        template.settings, template.installed = record.settings, inventory.installed
        template.paths = tuple(inventory.paths)
        self._by_key.setdefault(record.key, template)
        return template

    def refresh(self) -> None:
        """Retire each template that was told other settings, or imported other code, than the next one would.

        Its workers go on. It ends when it has none (`trim`).
        """
        now: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
        for template in [one for one in self._by_key.values() if one.ready]:
            imports = template.paths, template.key.preload
            if imports not in now:
                now[imports] = fingerprint(*imports)
            if (template.settings, template.installed) != (self._settings, now[imports]):
                what = "code" if template.settings == self._settings else "settings"
                log.info("template %d forks no more workers: its %s are not those of now", template.pid, what)
                self.retire(template)

    def registered(self, seconds: float) -> None:
        """The head has taken this node; templates wait that long for another agentd, where they do."""
        if self._keep_s is None:
            return
        self._keep_s = seconds
        for template in self.running:
            template.send(spawn.KeepFor(seconds))

    def retire(self, template: Template) -> None:
        """The next launch of its kind gets another one."""
        if self._by_key.get(template.key) is template:
            del self._by_key[template.key]

    def trim(self, busy: Collection[Template]) -> None:
        """End the retired templates that are idle, and of the others those idle longest, beyond MAX_IDLE of them."""
        idle = [key for key, template in self._by_key.items() if template.ready and template not in busy]
        for key in idle[:-MAX_IDLE]:
            self.retire(self._by_key[key])
        serving = set(self._by_key.values())
        for template in self.running - serving - set(busy) - self._told_to_end:
            if template.ready:
                self._told_to_end.add(template)
                template.send(spawn.Shutdown())

    def shut_down(self) -> None:
        """Tell all to end."""
        for template in self.running:
            if template.ready:
                template.send(spawn.Shutdown())
            else:
                template.kill()  # it may be in a long import, and has no workers yet

    def _made(self, key: launch.Key, process: Process) -> Template:
        template = Template(self._loop, self._keeping, key, process, self._on_packet, self._ended)
        self.running.add(template)
        return template

    def _stem(self) -> str:
        """Of files that no other template has, or will have while one without a record runs on.

        Raises:
            OSError: when this process began cannot be read.
        """
        this = procfs.stat_of(os.getpid())
        while True:
            stem = f"{self._site.run_dir}/t/{this.pid}-{this.started}-{next(self._numbers)}"
            if not os.path.exists(f"{stem}.err"):
                return stem

    def _ended(self, template: Template) -> None:
        self.running.discard(template)
        self._told_to_end.discard(template)
        self.retire(template)
        self._on_end(template)
