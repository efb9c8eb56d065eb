"""agentd's command line: parse the options, load the configuration, then run the daemon, the keeper or `--reap`.

Runs on the main thread. Modules are imported where they are used, so that `--help` and errors come at once.

Exit codes: 0 stopped, 3 ended by `rlinf-actors head stop`, 64 wrong usage, 69 unavailable, 70 internal error, 77 no
permission, 78 wrong configuration or keys.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlinf_actors import version
from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.exit_codes import CONFIGURATION, INTERNAL_ERROR, NO_PERMISSION, UNAVAILABLE, USAGE
from rlinf_actors.procfs import forbid_dumps, open_standard_descriptors, set_name
from rlinf_actors.settings import Unit
from rlinf_actors.systemd.service_manager import DaemonStderr

log = logging.getLogger(__name__)


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    made = _ArgumentParser(
        prog="agentd",
        description="The agent of one node of an rlinf-actors cluster; with --head, the cluster's coordinator too.",
        epilog="Configuration: /etc/rlinf-actors/agentd.toml and agentd.d/*.toml beside it; the command line wins.",
        allow_abbrev=False,
    )
    role = made.add_mutually_exclusive_group()
    role.add_argument("--head", action="store_const", const=True, help="run the cluster's head in this process")
    role.add_argument("--connect", metavar="HOST:PORT", help="join the head there (also: RLINF_HEAD)")
    made.add_argument("--token", metavar="TOKEN", help="join the cluster by this token first (-: read it from stdin)")
    made.add_argument("--listen", metavar="HOST:PORT", help="where the head listens (default 127.0.0.1:6380)")
    made.add_argument("--config", metavar="FILE", help="configuration file (also: RLINF_ACTORS_CONFIG)")
    made.add_argument("--check-config", action="store_true", help="check the configuration and exit")
    made.add_argument(
        "--reap", action="store_true", help="end what an agentd that is gone left here, and exit (for ExecStopPost=)"
    )
    made.add_argument(
        "--keeper", action="store_true", help="be the keeper of rlinf-workers@.service, which starts templates"
    )
    made.add_argument("--node-rank", type=int, dest="rank", metavar="N", help="its rank (also: RLINF_NODE_RANK)")
    made.add_argument("--node-id", metavar="ID", help="this node's id, the same after a restart")
    made.add_argument("--name", help="this node's name for people (default: the host's)")
    made.add_argument("--run-dir", metavar="DIR", help="directory for sockets, used by this agentd alone")
    made.add_argument("--log-dir", metavar="DIR", help="directory for the output of workers")
    made.add_argument(
        "--state-dir",
        metavar="DIR",
        help="directory for what the head knows after a restart (default: below XDG_STATE_HOME, else /var/lib for "
        "root, else ~/.local/state)",
    )
    made.add_argument("--hardware", metavar="FILE", dest="described", help="JSON that stands in for the hardware")
    made.add_argument(
        "--prestart", type=_modules, metavar="MODULE,...", help='start a template with these ahead of need ("": none)'
    )
    made.add_argument("--embedded", action="store_const", const=True, help="belong to a driver (--owner-pid)")
    made.add_argument("--owner-pid", type=int, metavar="PID", help="end everything when this process ends")
    made.add_argument("--owner-start", type=int, metavar="TICKS", help="start of that process, ticks since boot")
    made.add_argument(
        "--of-run",
        action="store_true",
        help="belong to `rlinf-actors run`: read from stdin what to be, and end everything when stdin closes",
    )
    made.add_argument("--ready-fd", type=int, metavar="FD", help="write one JSON line there when registered")
    made.add_argument(
        "--insecure-test-network",
        action="store_const",
        const=True,
        dest="insecure",
        help="allow TCP outside loopback without keys: closed test networks only",
    )
    made.add_argument(
        "--key-fd", type=int, metavar="FD", help="inherited descriptor of the key file, which is closed once it is read"
    )
    made.add_argument(
        "--strict",
        action="store_const",
        const=True,
        help="admit only drivers that [admit] in the configuration lists (also: strict there)",
    )
    made.add_argument("--version", action="version", version=f"agentd {version.VERSION}")
    return made


def _modules(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run agentd with the arguments *argv* (sys.argv by default). Return its exit code."""
    open_standard_descriptors()
    forbid_dumps()  # it holds the node's key and the tokens of jobs, and workers may be of its user
    options = vars(parser().parse_args(argv))
    check_only, reap_only, keeper = options.pop("check_config"), options.pop("reap"), options.pop("keeper")
    token, of_run = options.pop("token"), options.pop("of_run")
    from agentd.config import check_addresses, check_files, for_reaping, load, own_key
    from rlinf_actors.net.socket_security import Security
    from rlinf_actors.settings import Settings

    stderr = DaemonStderr("agentd", sys.stderr, "")
    try:
        unit = Unit.load()
        stderr = DaemonStderr("agentd", sys.stderr, unit.journal_stream)
        stderr.set_up_logging()
        if keeper:
            return _keep(options["run_dir"] or unit.run_dir, stderr)
        if of_run:
            from agentd.owner import take_order

            options.update(take_order(0, os.environ))
        if token is not None:
            code = _ends(lambda: _join(token, options), stderr, lambda code, text: None)
            if code:
                return code
        config = load(options, os.environ) if not reap_only else for_reaping(options, os.environ)
        if not config.head and config.connect is None and not check_only and not reap_only:
            return _say(
                stderr, USAGE, "say what to be: --head, --connect HOST:PORT, or [head] in the configuration file"
            )
        if config.embedded and config.owner_pid is None:
            return _say(stderr, USAGE, "--embedded belongs to a driver: give --owner-pid too")
        if not reap_only:
            check_addresses(config, Security.of(own_key(config, Settings.load()), config.insecure))
        if check_only:
            check_files(config)
    except ConfigError as error:
        return _say(stderr, CONFIGURATION, str(error), options.get("ready_fd"))
    if check_only:
        print("\n".join(config.files) or "no configuration file; defaults")  # noqa: T201 - what was asked for
        return 0
    if reap_only:
        from agentd.adoption import reap

        return _ends(lambda: reap(config, unit.result, unit.keeper), stderr, lambda code, text: None)
    return _run(config, options, stderr)


def run() -> NoReturn:
    """Run agentd as a program, and end the process at once: the interpreter would take apart all that agentd has
    imported, which takes it a third of the time of a start.
    """
    set_name("rlinf-keeper" if "--keeper" in sys.argv else "agentd")
    code = main()
    atexit._run_exitfuncs()
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(code)


def _join(token: str, options: dict[str, Any]) -> int:
    """Make this node's key by the join token *token*. Set the options --connect and key_file for it."""
    from agentd.config import load
    from rlinf_actors.net import enrolment
    from rlinf_actors.security import job, keyfile
    from rlinf_actors.settings import Settings

    content = job.parse(sys.stdin.readline() if token == "-" else token)
    if content.role != "agent":
        raise ConfigError("is for a driver: use it with `rlinf-actors keys join`", path=job.PATH)
    given = options["connect"]
    options["connect"] = given or content.address
    config = load(options, os.environ)
    folder = keyfile.directory(Settings.load())
    joined = enrolment.join(content, folder, log.info, address=given, node_id=config.node_id or "", user=keyfile.user())
    log.info("node %s has the key %s", joined.key.name, joined.key.path)
    if joined.warning:
        log.warning("%s", joined.warning)
    options["key_file"] = joined.key.path  # also on loopback, where keys of other machines' heads are not looked for
    return 0


def _keep(directory: str | None, stderr: DaemonStderr) -> int:
    if directory is None:
        return _say(stderr, USAGE, "--keeper needs a directory for its socket: --run-dir, or RuntimeDirectory=")
    from agentd.keeper_client import become_keeper

    return _ends(lambda: become_keeper(f"{directory}/keeper"), stderr, lambda code, text: None)


def _run(config: Any, options: dict[str, Any], stderr: DaemonStderr) -> int:
    from agentd.daemon import Daemon
    from rlinf_actors.diagnosis.recent_log import RecentLog
    from rlinf_actors.net.daemon import run_daemon

    logging.getLogger().addHandler(RecentLog())
    daemon = Daemon(config, options)

    def serve() -> int:
        code = run_daemon(daemon.run)
        daemon.status.stopped(code)
        return code

    return _ends(serve, stderr, daemon.status.failed)


def _ends(work: Callable[[], int], stderr: DaemonStderr, failed: Callable[[int, str], None]) -> int:
    """Run *work* and return its exit code. If *work* raises an exception, print the error on one line, call *failed*
    with that line and the exit code for the error, and return that exit code.
    """
    try:
        return work()
    except ConfigError as error:
        code, text = CONFIGURATION, str(error)
    except RlinfActorsError as error:
        code, text = UNAVAILABLE, str(error)
    except OSError as error:
        code = CONFIGURATION if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else UNAVAILABLE
        if isinstance(error, PermissionError):
            code = NO_PERMISSION
        text = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
    except Exception as error:  # a bug of ours, in a task or in the start
        log.critical("internal error", exc_info=True)
        code, text = INTERNAL_ERROR, f"internal error: {type(error).__name__}: {error}"
    failed(code, text)
    return _say(stderr, code, text)


def _say(stderr: DaemonStderr, code: int, text: str, ready_fd: int | None = None) -> int:
    """Print the error *text* on stderr and return *code*. If a driver started agentd, *ready_fd* is the pipe to the
    driver, and *code* and *text* are written to it too.
    """
    stderr.say(text)
    if ready_fd is not None:
        import json

        os.write(ready_fd, json.dumps({"error": text, "code": code}).encode() + b"\n")
    return code
