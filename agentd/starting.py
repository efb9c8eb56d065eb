"""A worker from its spec to a template that was asked to start it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from agentd import launch
from agentd.child import Child
from agentd.logs import Logs
from agentd.pool import TemplatePool
from rlinf_actors.errors import WorkerStartError
from rlinf_actors.wire import spawn
from rlinf_actors.wire.values import WorkerSpec


class Starter:
    """Starts workers through templates. Loop thread only.

    Args:
        rules: of this node.
        place: what a worker is told of where it is, but for its files and its lease.
        environment: the node's environment, asked for at every launch.
        templates: of this agent.
        logs: read the files of workers whose output is passed on.
    """

    def __init__(
        self,
        rules: launch.Rules,
        place: Callable[..., spawn.WorkerPlace],
        environment: Callable[[], Mapping[str, str]],
        templates: TemplatePool,
        logs: Logs,
    ) -> None:
        self.environment = environment
        self._rules = rules
        self._place = place
        self._templates = templates
        self._logs = logs

    def prestart(self, preload: Sequence[str]) -> None:
        """Start the template of agentd's own interpreter.

        Raises:
            OSError: it cannot be started.
        """
        env = self.environment()
        self._templates.get(launch.template_key(self._rules.own, env, preload), env)

    def prepare(self, spec: WorkerSpec, env: Mapping[str, str]) -> Child:
        """Plan a worker, and find or start its template; `ask` that once it is ready.

        Args:
            spec: of the worker.
            env: the node's environment.

        Raises:
            WorkerStartError: it cannot be started here, and why.
        """
        where = f"{spec.group}:{spec.rank} cannot be started on node {self._rules.node}"
        plan = launch.plan(spec, env, self._rules)
        try:
            template = self._templates.get(plan.key, env)
        except OSError as error:
            raise WorkerStartError(f"{where}: {plan.key.interpreter}: {error.strerror}") from None
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
        place = self._place(out_path=worker.plan.out_path, err_path=worker.plan.err_path)
        worker.template.send(spawn.Fork(worker.spec, place, worker.plan.env))

    def renew(self, until: float, lease_s: float) -> None:
        """New robot workers may go on until that time of the loop, and then as long as such a lease."""
        self._place = partial(self._place, lease_until=until, lease_s=lease_s)
