"""agentd's command line. Exit codes: 0, 64 usage, 69 unavailable, 77 permission, 78 configuration or keys."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rlinf_actors import version
from rlinf_actors.errors import ConfigError, RlinfActorsError

USAGE = 64


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(
        prog="agentd",
        description="The agent of one node of an rlinf-actors cluster; with --head, the cluster's coordinator too.",
        epilog="Configuration: /etc/rlinf-actors/agentd.toml and agentd.d/*.toml beside it; the command line wins.",
        allow_abbrev=False,
    )
    role = made.add_mutually_exclusive_group()
    role.add_argument("--head", action="store_const", const=True, help="run the cluster's head in this process")
    role.add_argument("--connect", metavar="HOST:PORT", help="join the head there (also: RLINF_HEAD)")
    made.add_argument("--listen", metavar="HOST:PORT", help="where the head listens (default 127.0.0.1:6380)")
    made.add_argument("--config", metavar="FILE", help="configuration file (also: RLINF_ACTORS_CONFIG)")
    made.add_argument("--check-config", action="store_true", help="check the configuration and exit")
    made.add_argument("--node-rank", type=int, dest="rank", metavar="N", help="its rank (also: RLINF_NODE_RANK)")
    made.add_argument("--node-id", metavar="ID", help="this node's id, the same after a restart")
    made.add_argument("--name", help="this node's name for people (default: the host's)")
    made.add_argument("--run-dir", metavar="DIR", help="directory for sockets, used by this agentd alone")
    made.add_argument("--log-dir", metavar="DIR", help="directory for the output of workers")
    made.add_argument("--state-dir", metavar="DIR", help="directory for what the head knows after a restart")
    made.add_argument("--hardware", metavar="FILE", dest="described", help="JSON that stands in for the hardware")
    made.add_argument(
        "--prestart", type=_modules, metavar="MODULE,...", help='start a template with these ahead of need ("": none)'
    )
    made.add_argument("--embedded", action="store_const", const=True, help="belong to a driver (--owner-pid)")
    made.add_argument("--owner-pid", type=int, metavar="PID", help="end everything when this process ends")
    made.add_argument("--owner-start", type=int, metavar="TICKS", help="start of that process, ticks since boot")
    made.add_argument("--ready-fd", type=int, metavar="FD", help="write one JSON line there when registered")
    made.add_argument(
        "--insecure-test-network",
        action="store_const",
        const=True,
        dest="insecure",
        help="allow TCP outside loopback without keys: closed test networks only",
    )
    made.add_argument("--version", action="version", version=f"agentd {version.VERSION}")
    return made


def _modules(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run agentd; returns its exit code."""
    options = vars(parser().parse_args(argv))
    check_only = options.pop("check_config")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="agentd %(asctime)s %(levelname)s: %(message)s")
    from agentd.config import load
    from agentd.security import check_addresses, security_of
    from rlinf_actors.settings import Settings

    try:
        config = load(options, os.environ)
        if not config.head and config.connect is None and not check_only:
            return _say(USAGE, "say what to be: --head, --connect HOST:PORT, or [head] in the configuration file")
        if config.embedded and config.owner_pid is None:
            return _say(USAGE, "--embedded belongs to a driver: give --owner-pid too")
        check_addresses(config, security_of(config, Settings.load()))
    except ConfigError as error:
        return _say(78, str(error), options.get("ready_fd"))
    if check_only:
        print("\n".join(config.files) or "no configuration file; defaults")  # noqa: T201 - what was asked for
        return 0
    return _run(config, options)


def _run(config: Any, options: dict[str, Any]) -> int:
    from agentd.daemon import CONFIGURATION, NO_PERMISSION, UNAVAILABLE, Daemon
    from rlinf_actors.net.loop import new_event_loop

    daemon = Daemon(config, options)
    loop = new_event_loop()
    try:
        code = loop.run_until_complete(daemon.run())
        daemon.fail(code, "agentd was stopped before it was ready")  # nothing to a driver that was told already
        return code
    except ConfigError as error:
        code, text = CONFIGURATION, str(error)
    except RlinfActorsError as error:
        code, text = UNAVAILABLE, str(error)
    except PermissionError as error:
        code, text = NO_PERMISSION, f"{error.strerror}: {error.filename or ''}".rstrip(": ")
    except OSError as error:
        code = CONFIGURATION if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else UNAVAILABLE
        text = error.strerror or str(error)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    daemon.fail(code, text)
    return _say(code, text)


def _say(code: int, text: str, ready_fd: int | None = None) -> int:
    """One line for people, and for the driver that waits."""
    print(f"agentd: {text}", file=sys.stderr)  # noqa: T201 - the reason of the exit code
    if ready_fd is not None:
        import json

        os.write(ready_fd, json.dumps({"error": text, "code": code}).encode() + b"\n")
    return code
