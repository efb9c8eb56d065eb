"""What is decided and made ready before workers can run here: interpreters, files, cgroups."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from agentd.config import Config, default_interpreters
from agentd.keeping import pid_of
from agentd.launch import Rules
from agentd.node import default_log_dir
from agentd.site import Site
from agentd.sweep import clear_cgroups
from rlinf_actors.cgroups.roots import Roots, find
from rlinf_actors.cgroups.worker import prepare
from rlinf_actors.errors import ConfigError
from rlinf_actors.net.security import is_loopback
from rlinf_actors.wire.values import NodeReport

log = logging.getLogger(__name__)


def site(
    config: Config,
    run_dir: str,
    report: NodeReport,
    environment: Callable[[], Mapping[str, str]],
    *,
    head: str,
    head_key: str,
    keeps: bool,
    keeper: str = "",
) -> Site:
    """Where the workers of this node run; makes their cgroups' root ready. Loop thread.

    Args:
        config: agentd's.
        run_dir: its directory of sockets.
        report: the node.
        environment: what the node gives its workers.
        head: the coordinator's endpoint.
        head_key: its public key, "" without keys.
        keeps: whether workers may go on without this process.
        keeper: the socket of the keeper in the workers' unit, "" without one.

    Raises:
        ConfigError: the configured cgroup cannot be used.
    """
    found = roots(config, keeper)
    clear_cgroups(asyncio.get_running_loop(), found)  # what workers of an earlier agentd left in theirs
    rules = Rules(
        report.hostname,
        config.log_dir or default_log_dir(config, run_dir, os.environ),
        allowed=allowed_interpreters(config, report),
        cgroups=found,
        log_bytes=int(config.log_max_mb * 2**20),
    )
    return Site(
        rules,
        Path(run_dir),
        head=head,
        node_ip=report.ip,
        host=report.host,
        environment=environment,
        listen_ip="" if is_loopback(report.ip) else report.ip,
        head_key=head_key,
        resources=report.resources,
        owner_pid=config.owner_pid,
        keep_s=config.head_grace_s if keeps else None,
        keeper=keeper if pid_of(keeper) is not None else "",
    )


def allowed_interpreters(config: Config, report: NodeReport) -> tuple[str, ...] | None:
    """Prefixes of those that may be started: configured, else any on loopback, else the usual ones."""
    found = config.interpreters
    if found is None and not is_loopback(report.ip):
        found = default_interpreters()
    return None if found is None else tuple(found)


def roots(config: Config, keeper: str) -> Roots:
    """Where workers' cgroups are made; makes the parents of these ready, and says once what is missing.

    Args:
        config: agentd's.
        keeper: the socket of the keeper in the workers' unit, "" without one.

    Raises:
        ConfigError: the configured cgroup cannot be used.
    """
    pid = pid_of(keeper) if keeper else None
    if keeper and pid is None:
        log.warning("no keeper listens on %s: systemctl start rlinf-workers@USER, then restart this agentd", keeper)
    try:
        found = prepare(find(config.cgroup, pid=pid))
    except ValueError as error:
        raise ConfigError(str(error), path="workers.cgroup") from None
    if "cgroup" in found.why:
        log.warning(
            "workers get no cgroups, so memory_limit and pids_limit are unavailable, and what workers leave is found "
            "by its brand alone. To have them: %s", found.why["cgroup"],
        )  # fmt: skip
    else:
        for why, names in _by_reason(found.why).items():
            log.info("%s unavailable: %s", " and ".join(f"{name}_limit" for name in names), why)
    return found


def _by_reason(why: Mapping[str, str]) -> dict[str, list[str]]:
    return {text: [name for name in why if why[name] == text] for text in dict.fromkeys(why.values())}
