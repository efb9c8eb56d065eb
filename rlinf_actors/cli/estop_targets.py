"""Find the heads that get an emergency stop, and report the answer of each. For `rlinf-actors estop` and its button.

Safety code; the rules of `cli.estop` apply: do not import asyncio, click or rich, and send the stop to all other heads
even if one head has a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.net import discovery
from rlinf_actors.net.blocking_client import BlockingClient, HeadAnswered, HeadDown, RemoteHead, Route
from rlinf_actors.net.head_records import HeadRecord, find_records
from rlinf_actors.net.host import split_address
from rlinf_actors.net.socket_security import Security, is_loopback, is_tcp
from rlinf_actors.security.keyfile import who
from rlinf_actors.settings import HEAD, HEAD_KEY, HEADS_DIR, KEY_DIR, KEY_FILE, RUN_DIR, Settings
from rlinf_actors.wire.client_messages import EStop, EStopped
from rlinf_actors.wire.control_codec import Failed
from rlinf_actors.wire.protocol import printable

OK, USAGE, UNAVAILABLE, PERMISSION, CHOICE, INTERRUPTED = 0, 64, 69, 77, 78, 130
DEADLINE_S = 5.0
"""Seconds that a head may take to answer. A stop takes milliseconds; a head saves it to disk before it answers."""
OBSERVERS = ("head", "driver", "agent")
"""Roles whose key can be used to connect to the configured head, in the order in which they are tried."""
_CANNOT_BE_WRONG = (HEAD, HEADS_DIR, RUN_DIR, KEY_DIR, KEY_FILE, HEAD_KEY)
"""Variables that an emergency stop still reads if another environment variable has an invalid value."""
MAY_MOVE = "ROBOTS MAY STILL MOVE: PRESS THEIR OWN EMERGENCY STOPS."


# --- which heads ---


@dataclass(eq=False)
class StopTarget:
    """A head that gets the stop.

    Attributes:
        address: value of --head that names this head.
        description: what the head is, for people.
        record: the record by which the head was found, None if it was found in the configuration only.
        asked: the connection to the head.
    """

    address: str
    description: str
    record: HeadRecord | None
    asked: RemoteHead

    @property
    def key(self) -> tuple[str, ...]:
        """Key that identifies the head until its process ends."""
        if self.record is not None and self.record.path:
            return (self.record.path,)
        return tuple(dict.fromkeys(endpoint for endpoint, _ in self.asked.ways)) or (self.address,)


@dataclass
class KnownHeads:
    """All heads that were found, and faults of the search.

    Attributes:
        targets: the heads.
        troubles: faults that may hide a head, for people. If there is one, the stop counts as incomplete.
        notes: further remarks for people.
    """

    targets: list[StopTarget] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def known_heads(given: str | None) -> KnownHeads:
    """Find every head that this user may stop.

    Args:
        given: value of the option --head, which limits the result to that head; None for all heads.

    Raises:
        ConfigError: *given* is not an address.
    """
    known = KnownHeads()
    settings = settings_here(known)
    if given:
        endpoint = discovery.endpoint_at(given, "--head", resolve=False)
        known.targets.append(_named_head(endpoint, given, "--head", settings))
        return known
    seen = find_records(settings, everybody=True)
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
            known.targets.append(StopTarget(record.address, record.told(), record, RemoteHead(ways)))
    text, source = discovery.named(None, settings)
    if text:
        try:
            endpoint = discovery.endpoint_at(text, source, resolve=False)
        except ConfigError as error:
            known.troubles.append(f"the configured head is not known: {error}")
        else:
            there = [one.record for one in known.targets if one.record is not None and _is_at(one, endpoint)]
            if all(record.user != os.geteuid() for record in there):
                known.targets.append(_named_head(endpoint, text, source, settings, there))
    return known


def settings_here(known: KnownHeads) -> Settings:
    """Return the settings from the environment and the client file.

    A fault in either is appended to ``known.troubles`` instead of raised, so that local heads still get the stop.
    """
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


def _named_head(
    endpoint: str, text: str, source: str, settings: Settings, others: Sequence[HeadRecord] = ()
) -> StopTarget:
    """Return the head that --head, an environment variable or the client file names.

    Args:
        endpoint: endpoint of the head.
        text: the text that names the head.
        source: where that text is: "--head", the variable or the file.
        settings: settings of this process.
        others: records of other users that name this endpoint. If root has no key for the head, the keys of these
            users are used, but only at this endpoint: a record is no proof of where the head listens.
    """
    ways: list[Route] = []
    fault = ""
    try:
        security = discovery.security_toward(endpoint, settings, *OBSERVERS)
        ways.append((endpoint, security))
        if is_tcp(endpoint) and (security.pair is None or is_loopback(split_address(endpoint, source)[0])):
            ways += [(endpoint, record.security) for record in others]
    except ConfigError as error:
        fault = str(error)
    return StopTarget(text, f"head, by {source}", None, RemoteHead(ways, fault))


def _ways(record: HeadRecord, known: KnownHeads) -> list[Route]:
    """Return the endpoints of the head of *record*, each with the keys for it. Unix sockets need no key."""
    local: list[Route] = [(way, Security()) for way in record.ways if not is_tcp(way)]
    if record.user != os.geteuid():  # opening another user's key file may block
        return [*local, *((way, record.security) for way in record.ways if is_tcp(way))]
    try:
        security = record.security()
    except RlinfActorsError as error:
        known.notes.append(f"{record.address}: its key cannot be used: {error}")
        return local
    return [*local, *((way, security) for way in record.ways if is_tcp(way))]


def _is_same(target: StopTarget, record: HeadRecord) -> bool:
    """True if *record* is of the same head as *target*.

    The records must be of the same user: otherwise a user could claim the endpoint of another user's head, and answer
    the stop in its place.
    """
    same_user = target.record is not None and target.record.user == record.user
    return same_user and any(_is_at(target, way) for way in record.ways)


def _is_at(target: StopTarget, endpoint: str) -> bool:
    """True if *endpoint* is one of the endpoints of the target's head."""
    ways = [*(target.record.endpoints if target.record is not None else ()), *(way for way, _ in target.asked.ways)]
    return any(way == endpoint or discovery.is_here(endpoint, way) for way in ways)


# --- the stop ---


def question_of(options: argparse.Namespace) -> EStop:
    return EStop(who(), options.reason, options.namespace, options.release)


def collect(asker: BlockingClient, targets: Sequence[StopTarget], report: Report) -> None:
    """Pass each head's answer to *report* as it arrives. Return when all heads have answered, or after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    waiting = {target.asked: target for target in targets}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for event in asker.step(left)[0]:
            target = waiting.get(event.head)
            if target is None or not isinstance(event, (HeadDown, HeadAnswered)):
                continue
            if isinstance(event, HeadDown):
                report.failed(target, event.why)
            elif isinstance(event.body, EStopped):
                report.stopped(target, event.body)
            elif isinstance(event.body, Failed):
                report.failed(target, f"it refused: {event.body.text}")
            else:
                continue  # the answer to a beat
            del waiting[event.head]
            asker.drop(event.head)  # its further messages must not delay the other heads
    for target in waiting.values():
        how = "let this process in, but did not answer" if target.asked.up else "did not answer"
        report.failed(target, f"it {how} within {DEADLINE_S:g} s")


class Report:
    """Print the outcome of the stop at each head as soon as it is known.

    Args:
        as_json: True to print one JSON object at the end instead of lines for each head.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._clusters: list[dict[str, Any]] = []
        self._silent: list[str] = []

    def stopped(self, target: StopTarget, answer: EStopped) -> None:
        self._clusters.append({**_cluster(target), "acknowledged": True, "error": "", **summary(answer)})
        workers = len(answer.hits)
        what = f"{workers} robot worker{'s' * (workers != 1)} told" if workers else "no robot worker is running"
        self._line(f"STOPPED      {target.address}: {what} ({target.description})")
        for hit in answer.hits:
            where = f"{hit.worker} of namespace {hit.namespace} on {hit.node} ({', '.join(hit.robots)})"
            self._line(f"  {'told' if hit.reached else 'NOT REACHED'}: {where}")
            if not hit.reached:
                self._silent.append(f"{hit.worker} ON {hit.node}: ITS NODE IS SILENT; ITS LEASE ENDS BY ITSELF")
        for line in answer.stopped:
            self._line(f"  in force: {line}")
        if answer.warning:
            say(f"warning: {target.address}: {answer.warning}")

    def failed(self, target: StopTarget, why: str) -> None:
        nothing = {"hits": [], "in_force": [], "warning": ""}
        self._clusters.append({**_cluster(target), "acknowledged": False, "error": why, **nothing})
        self._line(f"NOT STOPPED  {target.address}: {why} ({target.description})")

    def end(self, known: KnownHeads) -> int:
        """Print the overall result and return the exit code. *known* has the troubles and notes of the search."""
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


def _cluster(target: StopTarget) -> dict[str, Any]:
    record = target.record
    return {
        "head": target.address,
        "endpoints": list(dict.fromkeys(endpoint for endpoint, _ in target.asked.ways)),
        "kind": record.kind if record is not None else "configured",
        "pid": record.pid if record is not None else None,
        "script": record.script if record is not None else "",
    }


def summary(answer: EStopped) -> dict[str, Any]:
    """Return the part of `estop --json` for one cluster. Keys are stable; new ones may be added."""
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


# --- output ---


def say(text: str) -> None:
    """Print a message for a person on stderr."""
    print(printable(text, len(text)), file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    print(json.dumps(data), flush=True)
