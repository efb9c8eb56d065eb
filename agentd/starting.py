"""A worker from its spec to a template that was asked to start it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from agentd import launch
from agentd.child import Child
from agentd.logs import Logs
from agentd.pool import TemplatePool
from agentd.site import Site
from agentd.templates import Template
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.scarce import explain
from rlinf_actors.wire import spawn
from rlinf_actors.wire.values import WorkerSpec


class Starter:
    """Starts workers through templates. Loop thread only.

    Args:
        site: where they run.
        templates: of this agent.
        logs: read the files of workers whose output is passed on.
    """

    def __init__(self, site: Site, templates: TemplatePool, logs: Logs) -> None:
        self._site = site
        self._templates = templates
        self._logs = logs
        self._lease = (0.0, 0.0)

    def prestart(self, preload: Sequence[str]) -> None:
        """Start the template of agentd's own interpreter.

        Raises:
            OSError: it cannot be started.
        """
        env = self._site.environment()
        self._templates.get(launch.template_key(self._site.rules.own, env, preload), env)

    def prepare(self, spec: WorkerSpec, env: Mapping[str, str]) -> Child:
        """Plan a worker, and find or start its template; `ask` that once it is ready.

        Args:
            spec: of the worker.
            env: the node's environment.

        Raises:
            WorkerStartError: it cannot be started here, and why.
        """
        where = f"{spec.group}:{spec.rank} cannot be started on node {self._site.node}"
        plan = launch.plan(spec, env, self._site.rules)
        try:
            template = self._templates.get(plan.key, env)
        except OSError as error:
            raise WorkerStartError(f"{where}: {plan.key.interpreter}: {explain(error)}") from None
        directory = os.path.dirname(plan.out_path)
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            text = f"its log directory {directory} cannot be used ({error.strerror}): choose another"
            raise WorkerStartError(f"{where}: {text}") from None
        if spec.forward_logs:
            self._logs.add(spec.id, f"{spec.group}:{spec.rank}", spec.namespace, plan.out_path, plan.err_path)
        return Child(spec, plan, template)

    def ask(self, worker: Child) -> None:
        """Have its template start it.

        Raises:
            OSError: its environment cannot be passed on.
        """
        worker.asked = True
        place = self._site.place(worker.plan.out_path, worker.plan.err_path, *self._lease)
        worker.template.send(spawn.Fork(worker.spec, place, worker.plan.env))

    def adopt(self, spec: WorkerSpec, kept: spawn.Kept, template: Template) -> Child:
        """One that *template* started for an earlier agentd; its output is read on."""
        if spec.forward_logs:
            at = (kept.out_read, kept.err_read)
            self._logs.add(spec.id, f"{spec.group}:{spec.rank}", spec.namespace, kept.out_path, kept.err_path, at)
            self._logs.grew([spec.id])
        return Child(spec, launch.Plan(template.key, {}, kept.out_path, kept.err_path), template, asked=True)

    def renew(self, until: float, lease_s: float) -> None:
        """New robot workers may go on until that time of the loop, and then as long as such a lease."""
        self._lease = (until, lease_s)
