"""`rlinf-actors estop`: stop all robots now.

Safety code with three rules. The request must leave as early as possible, so this module imports no asyncio, click or
rich. All heads are asked at once, and a fault of one head or setting must not keep another head from being asked. The
command never guesses: a stop goes to every head that can be found, a release only to the head that --head names or to
the only head found.

Exit codes: 0 if every known head has the stop on disk and no robot worker is left; 69 if not, or if no head is
known; 64 usage; 77 permission; 78 several heads and no choice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlinf_actors.cli.estop_targets import (
    Answer,
    Report,
    StopTarget,
    ask_all,
    known_heads,
    print_json,
    question_of,
    say,
    summary,
)
from rlinf_actors.errors import ConfigError
from rlinf_actors.exit_codes import CONFIGURATION, INTERRUPTED, NO_PERMISSION, SUCCESS, UNAVAILABLE, USAGE
from rlinf_actors.net import discovery
from rlinf_actors.wire.client_messages import EStopped, GetStatus, Status
from rlinf_actors.wire.control_codec import Failed

_CODES = {"authentication": NO_PERMISSION, "usage": USAGE, "config": CONFIGURATION}


class _StopParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say(f"{self.prog}: {message}")
        self.exit(USAGE)


def parser() -> argparse.ArgumentParser:
    made = _StopParser(
        prog="rlinf-actors estop",
        description="Stop all robots: their workers run on_lease_lost and end. Until --release no group that uses "
        "robots starts. The stop goes to every head of this user on this machine, to every head that an agentd of this "
        "user on this machine has joined, and to the configured head; as root, to the heads of all users. It is no "
        "replacement for the robot's own emergency stop: it needs this machine, the network and the head.",
        epilog="Exit code 0 only if a head is known, every known head has written the stop to disk, and the node of "
        "each robot worker has said that the worker and its children are gone; else 69.",
        allow_abbrev=False,
    )
    made.add_argument("--reason", default="", metavar="TEXT", help="shown to the owners of the workers that end")
    made.add_argument(
        "--job", dest="namespace", metavar="NAME", help="only the robots of this job (default: every robot)"
    )
    made.add_argument("--namespace", help=argparse.SUPPRESS)  # its earlier name: a stop must not fail for it
    made.add_argument("--head", metavar="HOST:PORT|DIR", help="only this head: its address, or its run directory")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--release", action="store_true", help="lift the stop: groups that use robots may be launched")
    what.add_argument(
        "--arm", action="store_true", help="stay connected; stop on Enter, on a byte from a pipe, or by --gpio-file"
    )
    made.add_argument("--gpio-file", metavar="FILE", help="with --arm: stop when this line has the level --gpio-at")
    made.add_argument("--gpio-at", choices=("0", "1"), default="1", help="the level that stops (default 1)")
    made.add_argument(
        "--on-loss", choices=("stop", "exit"), default="stop",
        help="with --arm: what to do when the pipe or the line is lost (default stop)",
    )  # fmt: skip
    made.add_argument(
        "--no-wait", action="store_true", help="do not wait until the robot workers have ended; 69 if any was running"
    )
    made.add_argument("--json", action="store_true", dest="as_json", help="print JSON with stable keys")
    return made


def main(arguments: Sequence[str]) -> int:
    try:
        options = parser().parse_args(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    if options.gpio_file and not options.arm:
        say("rlinf-actors estop: --gpio-file goes with --arm")
        return USAGE
    try:
        if options.arm:
            from rlinf_actors.cli import estop_button

            return estop_button.run(options)
        return _release(options) if options.release else _press(options)
    except ConfigError as error:  # --head is not an address
        say(f"error: {error}")
        return CONFIGURATION
    except KeyboardInterrupt:
        return INTERRUPTED


def _press(options: argparse.Namespace) -> int:
    known, report = known_heads(options.head), Report(options.as_json)
    then = None if options.no_wait else question_of(options, wait=True)
    for target, answer in ask_all(known.targets, question_of(options), then):
        report.add(target, answer)
    return report.end(known)


def _release(options: argparse.Namespace) -> int:
    """Release the emergency stop at the head that --head names, or at the only head found, and return the exit code. If
    several heads are found, list them and release nothing.
    """
    known = known_heads(options.head or discovery.named(None, discovery.client_settings())[0])
    for trouble in known.troubles:
        say(f"TROUBLE: {trouble}")
    if not known.targets:
        say("NO HEAD IS KNOWN, and so no stop was lifted: name it by --head HOST:PORT")
        return UNAVAILABLE
    if len(known.targets) > 1:
        _list_heads(known.targets)
        return CONFIGURATION
    target = known.targets[0]
    answer = dict(ask_all(known.targets, question_of(options)))[target]
    if not isinstance(answer, EStopped):
        say(f"error: the stop was not lifted: {target.address} ({target.description}): {_text(answer)}")
        return _CODES.get(answer.kind, UNAVAILABLE) if isinstance(answer, Failed) else UNAVAILABLE
    if options.as_json:
        print_json({"head": target.address, "lifted": answer.lifted, **summary(answer)})
    elif answer.lifted:
        say(f"LIFTED       {target.address}: {answer.lifted}", sys.stdout)
    for line in answer.stopped:
        say(f"still in force: {line}")
    if not answer.stopped:
        say(f"no emergency stop is in force at {target.address}")
    if answer.warning:
        say(f"warning: {answer.warning}")
    if answer.lifted or not (options.namespace or answer.stopped):
        return SUCCESS
    what = f"JOB {options.namespace!r}" if options.namespace else "ALL JOBS"
    say(f"NOTHING WAS LIFTED: NO STOP OF {what} IS IN FORCE AT {target.address}")
    return UNAVAILABLE


def _list_heads(targets: Sequence[StopTarget]) -> None:
    """Print the heads that a release could be meant for, each with the emergency stops that are in force there."""
    answers = dict(ask_all(targets, GetStatus()))
    say(f"{len(targets)} heads are known, and a release is for one of them; nothing was lifted. Say which by --head:")
    for target in targets:
        say(f"  --head {target.address}  {target.description}")
        status = answers[target]
        if isinstance(status, Status):
            for line in status.stopped or ["no emergency stop is in force"]:
                say(f"      {line}")
        else:
            say(f"      it did not say what is in force: {_text(status)}")


def _text(answer: Answer) -> str:
    return answer.text if isinstance(answer, Failed) else str(answer)
