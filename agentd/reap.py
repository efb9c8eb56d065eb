"""`agentd --reap`: end what an agentd that is gone left in its run directory. It is ExecStopPost= of the unit.

systemd runs ExecStopPost= after every end of a service, also before it starts a crashed one again, and then workers are
to go on. So the unit's own answer decides (`spared`); a person who runs this by hand means it.
"""

from __future__ import annotations

import contextlib
import logging
import os

from agentd.config import Config
from agentd.startup import RunDir, default_run_dir, was_stopping

log = logging.getLogger(__name__)


def spared(result: str, stop_asked: bool) -> str:
    """Why nothing is to be ended, "" if it is. Pure.

    Args:
        result: $SERVICE_RESULT, "" where systemd does not run us.
        stop_asked: whether that agentd was told to end with its workers.
    """
    if not result or stop_asked:
        return ""
    if result == "timeout":  # it did not even hear that it was to stop, and was killed for that
        return ""
    if result == "success":
        return "it handed over: workers wait for the next agentd"
    return f"it ended unasked ({result}): workers wait for the next agentd, and end by themselves if none comes"


def reap(config: Config, result: str, keeper: str = "") -> int:
    """End templates, workers and what they left; returns the exit code. Takes some seconds at most.

    Where they are spared it takes no time: systemd starts the next agentd after this.

    Args:
        config: names the run directory and where cgroups are.
        result: see `spared`.
        keeper: the socket of the keeper in the workers' unit, "" without one.

    Raises:
        ConfigError: an agentd runs there, or the directory is not ours.
        OSError: the directory cannot be read or written.
    """
    path = os.path.abspath(config.run_dir or default_run_dir(os.environ))
    why = spared(result, was_stopping(path))
    if why:
        log.info("nothing is ended in %s: %s", path, why)
        return 0
    if not os.path.isdir(path):
        log.info("there is nothing to reap: %s does not exist", path)
        return 0
    import asyncio  # what follows loads much of agentd

    from agentd.keeper_client import remove_files

    with contextlib.closing(RunDir.open(path, os.environ)) as directory:
        ended = asyncio.run(_end(path, config, keeper))
        directory.begin()
        remove_files(f"{path}/keeper")  # it has ended with the last template
    log.info("workers of an earlier agentd that were left in %s, and are ended: %d", path, ended)
    return 0


async def _end(path: str, config: Config, keeper: str) -> int:
    """End all of it; returns how many workers there were."""
    import asyncio

    from agentd.adoption import take_stock
    from agentd.startup import roots
    from agentd.sweep import clear_cgroups

    ended = (await take_stock(path, keep=False)).lost
    cleared = asyncio.Event()
    if clear_cgroups(asyncio.get_running_loop(), roots(config, keeper), cleared.set):
        await cleared.wait()
    return len(ended)
