"""`rlinf-actors estop`: stop all robots now.

House rules: from the start of the process to the question it takes as little as possible, so nothing here imports
asyncio, click or rich; all heads are asked at once, and what is wrong with one (or with a setting) keeps no other from
being asked. It never guesses: a stop goes to every head that it can find, a release to one that is named or alone.
Exit codes: 0 when every known head has acknowledged and every robot worker was reached, 64 usage, 69 when not, or when
no head is known, 77 permission, 78 several heads and no choice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.net import discovery
from rlinf_actors.net.asking import Answered, Asked, Asker, Down
from rlinf_actors.net.discovery import Record
from rlinf_actors.net.security import Security, is_tcp
from rlinf_actors.security.thisuser import who
from rlinf_actors.settings import HEAD, HEAD_KEY, HEADS_DIR, KEY_DIR, KEY_FILE, RUN_DIR, Settings
from rlinf_actors.wire.bounds import printable
from rlinf_actors.wire.messages import Body, Failed
from rlinf_actors.wire.operators import EStop, EStopped, GetStatus, Status

OK, USAGE, UNAVAILABLE, PERMISSION, CHOICE, INTERRUPTED = 0, 64, 69, 77, 78, 130
_CODES = {"authentication": PERMISSION, "usage": USAGE, "config": CHOICE}
DEADLINE_S = 5.0
"""For the answer of a head. The stop itself takes milliseconds; a head also writes it to its disk before it answers."""
OBSERVERS = ("head", "driver", "agent")
"""Whose key serves to ask the configured head."""
_CANNOT_BE_WRONG = (HEAD, HEADS_DIR, RUN_DIR, KEY_DIR, KEY_FILE, HEAD_KEY)
"""What an emergency stop reads of the environment where another variable keeps it from being read."""
MAY_MOVE = "ROBOTS MAY STILL MOVE: PRESS THEIR OWN EMERGENCY STOPS."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(
        prog="rlinf-actors estop",
        description="Stop all robots: their workers run on_lease_lost and end. Until --release no group that uses "
        "robots starts. Goes to every head of this user on this machine, to those that its agentds have joined, and to "
        "the configured one; as root to those of all users. It is no replacement for the robot's own emergency stop: "
        "it needs this machine, the network and the head.",
        epilog="Exit code 0 only when every known head has acknowledged, and there was one; else 69.",
        allow_abbrev=False,
    )
    made.add_argument("--reason", default="", metavar="TEXT", help="why; those whose workers end are told")
    made.add_argument("--namespace", metavar="NS", help="only the robots of this namespace (default: every robot)")
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
        help="with --arm: what the end of the pipe or of the line does (default stop)",
    )  # fmt: skip
    made.add_argument("--json", action="store_true", dest="as_json", help="print JSON with stable keys")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        options = parser().parse_args(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    if options.gpio_file and not options.arm:
        say("rlinf-actors estop: --gpio-file goes with --arm")
        return USAGE
    try:
        if options.arm:
            from rlinf_actors.cli import armed

            return armed.run(options)
        return _release(options) if options.release else _press(options)
    except ConfigError as error:  # --head is no address
        say(f"error: {error}")
        return CHOICE
    except KeyboardInterrupt:
        return INTERRUPTED


# --- which heads ---


@dataclass(eq=False)
class Target:
    """A head that the stop goes to.

    Attributes:
        address: what --head takes.
        told: what it is, for people.
        record: that it was found by, None where it is configured only.
        asked: the connection.
    """

    address: str
    told: str
    record: Record | None
    asked: Asked

    @property
    def key(self) -> tuple[str, ...]:
        """What stays the same while this head lives."""
        if self.record is not None and self.record.path:
            return (self.record.path,)
        return tuple(endpoint for endpoint, _ in self.asked.ways) or (self.address,)


@dataclass
class Known:
    """Every head that is known, and what keeps others from being known.

    Attributes:
        targets: the heads.
        troubles: what may hide a head, for people; a stop is not complete then.
        notes: what else may interest them.
    """

    targets: list[Target] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def known_heads(given: str | None) -> Known:
    """Find every head that this user may stop.

    Args:
        given: the option --head, which limits it to that one.

    Raises:
        ConfigError: *given* is no address.
    """
    known = Known()
    settings = settings_here(known)
    if given:
        endpoint = discovery.endpoint_at(given, "--head", resolve=False)
        known.targets.append(_configured(endpoint, given, "--head", settings))
        return known
    seen = discovery.look(settings, everybody=True)
    for path, why in seen.unreadable:
        known.troubles.append(f"{path} cannot be read ({why}): the head that left it cannot be asked")
    for user in seen.others:
        known.notes.append(f"user {user} has heads on this machine too: only that user, or root, may stop them")
    for record in seen.records:
        ways = _ways(record, known)
        shared = next((one for one in known.targets if _is_same(one, record)), None)
        if shared is not None:  # several agentds of one head, or an agentd beside its head
            shared.asked.ways = [*shared.asked.ways, *(way for way in ways if way not in shared.asked.ways)]
        else:
            known.targets.append(Target(record.address, record.told(), record, Asked(ways)))
    text, source = discovery.named(None, settings)
    if text:
        try:
            endpoint = discovery.endpoint_at(text, source, resolve=False)
        except ConfigError as error:
            known.troubles.append(f"the configured head is not known: {error}")
        else:
            if not any(_is_at(one, endpoint) for one in known.targets):
                known.targets.append(_configured(endpoint, text, source, settings))
    return known


def settings_here(known: Known) -> Settings:
    """What the environment and the client file say. What is wrong with one must not keep the heads here from a stop."""
    try:
        settings = Settings.load()
    except ConfigError as error:
        known.troubles.append(f"the environment says something that cannot be: {error}")
        return Settings.load({name: os.environ[name] for name in _CANNOT_BE_WRONG if name in os.environ})
    try:
        return discovery.with_client_file(settings)
    except ConfigError as error:
        known.troubles.append(f"the client file cannot be used: {error}")
        return settings


def _configured(endpoint: str, text: str, source: str, settings: Settings) -> Target:
    try:
        ways = [(endpoint, discovery.security_toward(endpoint, settings, *OBSERVERS))]
        fault = ""
    except ConfigError as error:
        ways, fault = [], str(error)
    return Target(text, f"head, by {source}", None, Asked(ways, fault))


def _ways(record: Record, known: Known) -> list[tuple[str, Security]]:
    """How to reach the head of a record: its unix socket needs no key."""
    local = [(way, Security()) for way in record.ways if not is_tcp(way)]
    try:
        security = record.security()
    except RlinfActorsError as error:
        known.notes.append(f"{record.address}: its key cannot be used: {error}")
        return local
    return [*local, *((way, security) for way in record.ways if is_tcp(way))]


def _is_same(target: Target, record: Record) -> bool:
    return any(_is_at(target, way) for way in record.ways)


def _is_at(target: Target, endpoint: str) -> bool:
    """True if the target's head listens at this endpoint."""
    ways = [*(target.record.endpoints if target.record is not None else ()), *(way for way, _ in target.asked.ways)]
    return any(way == endpoint or discovery.is_here(endpoint, way) for way in ways)


# --- the stop ---


def question_of(options: argparse.Namespace) -> EStop:
    """What the options ask of a head."""
    return EStop(who(), options.reason, options.namespace, options.release)


def _press(options: argparse.Namespace) -> int:
    report = Report(options.as_json)
    asker = Asker()
    try:
        known = known_heads(options.head)
        question = question_of(options)
        for target in known.targets:
            asker.ask(target.asked, question)  # goes out as soon as the head lets this process in
            asker.add(target.asked)
        collect(asker, known.targets, report)
    finally:
        asker.close()
    return report.end(known)


def collect(asker: Asker, targets: Sequence[Target], report: Report) -> None:
    """Report the answer of each head to the stop, as it comes; returns when all have answered, or at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    waiting = {target.asked: target for target in targets}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for event in asker.step(left)[0]:
            target = waiting.get(event.head)
            if target is None or not isinstance(event, (Down, Answered)):
                continue
            if isinstance(event, Down):
                report.failed(target, event.why)
            elif isinstance(event.body, EStopped):
                report.stopped(target, event.body)
            elif isinstance(event.body, Failed):
                report.failed(target, f"it refused: {event.body.text}")
            else:
                continue  # of a beat
            del waiting[event.head]
    for target in waiting.values():
        how = "let this process in, but did not answer" if target.asked.up else "did not answer"
        report.failed(target, f"it {how} within {DEADLINE_S:g} s")


class Report:
    """Says what became of the stop at each head, in the order in which it became known.

    Args:
        as_json: print one object at the end, for programs, and not a line for each.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._clusters: list[dict[str, Any]] = []
        self._silent: list[str] = []

    def stopped(self, target: Target, answer: EStopped) -> None:
        """The head has acknowledged."""
        self._clusters.append({**_cluster(target), "acknowledged": True, "error": "", **summary(answer)})
        workers = len(answer.hits)
        what = f"{workers} robot worker{'s' * (workers != 1)} told" if workers else "no robot worker is running"
        self._line(f"STOPPED      {target.address}: {what} ({target.told})")
        for hit in answer.hits:
            where = f"{hit.worker} of namespace {hit.namespace} on {hit.node} ({', '.join(hit.robots)})"
            self._line(f"  {'told' if hit.reached else 'NOT REACHED'}: {where}")
            if not hit.reached:
                self._silent.append(f"{hit.worker} ON {hit.node}: ITS NODE IS SILENT; ITS LEASE ENDS BY ITSELF")
        for line in answer.stopped:
            self._line(f"  in force: {line}")
        if answer.warning:
            say(f"warning: {target.address}: {answer.warning}")

    def failed(self, target: Target, why: str) -> None:
        """The head has not acknowledged."""
        nothing = {"hits": [], "in_force": [], "warning": ""}
        self._clusters.append({**_cluster(target), "acknowledged": False, "error": why, **nothing})
        self._line(f"NOT STOPPED  {target.address}: {why} ({target.told})")

    def end(self, known: Known) -> int:
        """Say what it came to; returns the exit code."""
        missing = [cluster for cluster in self._clusters if not cluster["acknowledged"]]
        complete = bool(self._clusters) and not missing and not self._silent and not known.troubles
        if self._as_json:
            hits = [hit for cluster in self._clusters for hit in cluster["hits"]]
            in_force = [line for cluster in self._clusters for line in cluster["in_force"]]
            warning = "; ".join(cluster["warning"] for cluster in self._clusters if cluster["warning"])
            data = {"clusters": self._clusters, "complete": complete, "troubles": known.troubles}
            print_json({**data, "hits": hits, "in_force": in_force, "warning": warning})
        for text in known.notes:
            say(f"note: {text}")
        for text in known.troubles:
            say(f"TROUBLE: {text}")
        for text in self._silent:
            say(f"NOT CONFIRMED: {text}")
        if not self._clusters:
            say(
                f"NOTHING WAS STOPPED: NO HEAD IS KNOWN. {MAY_MOVE} No head of this user runs on this machine, and "
                f"none is configured: name it by --head HOST:PORT, RLINF_HEAD, or /etc/{discovery.CLIENT_FILE}"
            )
        elif missing:
            say(f"{len(missing)} OF {len(self._clusters)} HEADS DID NOT ACKNOWLEDGE THE EMERGENCY STOP. {MAY_MOVE}")
        elif not complete:
            say(f"THE EMERGENCY STOP IS NOT CONFIRMED EVERYWHERE. {MAY_MOVE}")
        else:
            say("every known head has acknowledged; `rlinf-actors estop --release` lifts it")
        return OK if complete else UNAVAILABLE

    def _line(self, text: str) -> None:
        if not self._as_json:
            print(printable(text, len(text)), flush=True)


def _cluster(target: Target) -> dict[str, Any]:
    record = target.record
    return {
        "head": target.address,
        "endpoints": [endpoint for endpoint, _ in target.asked.ways],
        "kind": record.kind if record is not None else "configured",
        "pid": record.pid if record is not None else None,
        "script": record.script if record is not None else "",
    }


def summary(answer: EStopped) -> dict[str, Any]:
    """What `estop --json` prints of a cluster; keys are stable, new ones may be added."""
    return {
        "hits": [
            {
                "worker": hit.worker,
                "namespace": hit.namespace,
                "robots": hit.robots,
                "node": hit.node,
                "reached": hit.reached,
            }
            for hit in answer.hits
        ],
        "in_force": answer.stopped,
        "warning": answer.warning,
    }


# --- the release ---


def _release(options: argparse.Namespace) -> int:
    """Lift the stop of the one head that is meant."""
    known = known_heads(options.head or discovery.named(None, discovery.client_settings())[0])
    for trouble in known.troubles:
        say(f"TROUBLE: {trouble}")
    if not known.targets:
        say("NO HEAD IS KNOWN, and so no stop was lifted: name it by --head HOST:PORT")
        return UNAVAILABLE
    if len(known.targets) > 1:
        _name_them(known.targets)
        return CHOICE
    target = known.targets[0]
    answer = _answers(known.targets, question_of(options)).get(target)
    if not isinstance(answer, EStopped):
        say(f"error: the stop was not lifted: {target.address} ({target.told}): {_text(answer)}")
        return _CODES.get(answer.kind, UNAVAILABLE) if isinstance(answer, Failed) else UNAVAILABLE
    if options.as_json:
        print_json({"head": target.address, "lifted": answer.lifted, **summary(answer)})
    elif answer.lifted:
        print(f"LIFTED       {target.address}: {answer.lifted}", flush=True)
    else:
        what = "nothing was in force that this lifts" if answer.lifted == "" else "an earlier version does not say what"
        print(f"LIFTED       {target.address}: {what}", flush=True)
    for line in answer.stopped:
        say(f"still in force: {line}")
    if not answer.stopped:
        say(f"no emergency stop is in force at {target.address}")
    if answer.warning:
        say(f"warning: {answer.warning}")
    return OK


def _name_them(targets: Sequence[Target]) -> None:
    """Say which heads there are, and whose stop is in force where."""
    answers = _answers(targets, GetStatus())
    say(f"{len(targets)} heads are known, and a release is for one of them; nothing was lifted. Say which by --head:")
    for target in targets:
        say(f"  --head {target.address}  {target.told}")
        status = answers.get(target)
        if isinstance(status, Status):
            for line in status.stopped or ["no emergency stop is in force"]:
                say(f"      {line}")
        else:
            say(f"      it did not say what is in force: {_text(status)}")


def _text(answer: object) -> str:
    """Why an answer is none."""
    return answer.text if isinstance(answer, Failed) else str(answer)


def _answers(targets: Sequence[Target], question: Body) -> Mapping[Target, object]:
    """What each head answers, or why it does not."""
    asker = Asker()
    answers: dict[Target, object] = {}
    by_asked = {target.asked: target for target in targets}
    deadline = time.monotonic() + DEADLINE_S
    try:
        for target in targets:
            asker.ask(target.asked, question)
            asker.add(target.asked)
        while len(answers) < len(targets) and (left := deadline - time.monotonic()) > 0:
            for event in asker.step(left)[0]:
                if isinstance(event, Down):
                    answers.setdefault(by_asked[event.head], event.why)
                elif isinstance(event, Answered):
                    answers[by_asked[event.head]] = event.body
    finally:
        asker.close()
    return {target: answers.get(target, f"it did not answer within {DEADLINE_S:g} s") for target in targets}


# --- saying ---


def say(text: str) -> None:
    """Say something to a person; stderr."""
    print(printable(text, len(text)), file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(data), flush=True)
