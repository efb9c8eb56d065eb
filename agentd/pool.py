"""The templates of one agentd: one for each kind of worker, started when first needed, a few kept idle."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from itertools import count

import msgspec

from agentd import launch
from agentd.site import Site
from agentd.templates import Process, Template, make_directories, start
from rlinf_actors import procfs
from rlinf_actors.wire import spawn

MAX_IDLE = 4
"""Templates without workers that are kept for later launches; the one used last stays longest."""


class TemplatePool:
    """All templates of this agent. Loop thread only.

    Args:
        loop: the agent's.
        site: where their workers run.
        owner: pidfd of the process whose end is the end of every template, -1 without.
        on_packet, on_end: of each template.

    Attributes:
        running: those whose process is not gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        site: Site,
        owner: int,
        on_packet: Callable[[Template, spawn.ToAgent], None],
        on_end: Callable[[Template], None],
    ) -> None:
        self.running: set[Template] = set()
        self._loop = loop
        self._site = site
        self._owner = owner
        self._keep_s = site.keep_s
        self._on_packet = on_packet
        self._on_end = on_end
        self._by_key: dict[launch.Key, Template] = {}
        self._numbers = count(1)
        self._pkg = make_directories(site.run_dir)

    def get(self, key: launch.Key, node_env: Mapping[str, str]) -> Template:
        """The template of this key; started if there is none.

        Raises:
            OSError: it cannot be started.
        """
        template = self._by_key.pop(key, None)
        if template is None or template.has_ended():
            stem = self._stem()
            rules = self._site.rules
            config = {"agent": os.getpid(), "owner": self._owner, "entry": self._site.entry, "slot": launch.SLOT}
            if self._keep_s is not None:
                config |= {"keep": f"{stem}.sock", "keep_s": self._keep_s}
            more = {"preload": key.preload, "cgroups": rules.cgroups, "log_bytes": rules.log_bytes}
            json = msgspec.json.encode({**config, **more}).decode()
            process = start(
                key,
                lambda fd: launch.template_command(key, self._pkg, fd, self._site.node, json),
                launch.template_environment(key, node_env),
                (self._owner,) if self._owner >= 0 else (),
                stem,
                self._keep_s is not None,
            )
            template = self._made(key, process)
        self._by_key[key] = template  # at the end: it was used last
        return template

    def adopt(self, key: launch.Key, process: Process) -> Template:
        """Take over a template of an earlier agentd."""
        template = self._made(key, process)
        template.ready = True
        self._by_key.setdefault(key, template)
        return template

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
        """End the templates that have been idle longest, beyond MAX_IDLE of them."""
        idle = [key for key, template in self._by_key.items() if template.ready and template not in busy]
        for key in idle[:-MAX_IDLE]:
            self._by_key.pop(key).send(spawn.Shutdown())

    def shut_down(self) -> None:
        """Tell all to end."""
        for template in self.running:
            if template.ready:
                template.send(spawn.Shutdown())
            else:
                template.kill()  # it may be in a long import, and has no workers yet

    def _made(self, key: launch.Key, process: Process) -> Template:
        template = Template(self._loop, key, process, self._on_packet, self._ended)
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
        self.retire(template)
        self._on_end(template)
