"""Find the heads that get an emergency stop, and print the answer of each. For cli.estop and cli.estop_button.

Safety code; the rules of cli.estop apply: import no asyncio, click or rich, and let no fault of one head keep another
head from being asked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, Union

import msgspec

from rlinf_actors.errors import ConfigError, RlinfActorsError
from rlinf_actors.exit_codes import SUCCESS, UNAVAILABLE
from rlinf_actors.net import discovery
from rlinf_actors.net.blocking_client import BlockingClient, HeadAnswered, HeadDown, RemoteHead, Route
from rlinf_actors.net.head_records import HeadRecord, find_records
from rlinf_actors.net.host import split_address
from rlinf_actors.net.socket_security import Security, is_loopback, is_tcp
from rlinf_actors.plurals import counted
from rlinf_actors.security.keyfile import who
from rlinf_actors.settings import HEAD, HEAD_KEY, HEADS_DIR, KEY_DIR, KEY_FILE, RUN_DIR, Settings
from rlinf_actors.wire.client_messages import EStop, EStopped, Status
from rlinf_actors.wire.control_codec import Body, Failed
from rlinf_actors.wire.protocol import printable

DEADLINE_S = 5.0
"""Seconds after which a head that has not answered is given up. Stopping takes milliseconds, but a head saves the stop
to disk first, and it may be restarting."""
LATE_S = 1.0
"""Seconds for which a head's answer about the ends of robot workers may be late."""
OBSERVERS = ("head", "driver", "agent")
"""Roles whose key may be used to connect to the configured head, in the order in which they are tried."""
_CANNOT_BE_WRONG = (HEAD, HEADS_DIR, RUN_DIR, KEY_DIR, KEY_FILE, HEAD_KEY)
"""Environment variables that are still used for a stop if another variable has an invalid value."""
MAY_MOVE = "ROBOTS MAY STILL MOVE: PRESS THEIR OWN EMERGENCY STOPS."


# --- which heads ---


@dataclass(eq=False)
class StopTarget:
    """A head to which the emergency stop is sent: the connection to it, and a description for people."""

    address: str  # the value of --head that names this head
    description: str  # for people
    record: HeadRecord | None  # by which the head was found; None if it was found only in the configuration
    asked: RemoteHead  # the connection to the head
    state: str = "new"  # for the button: new, armed or lost
    found_at: float = 0.0  # for the button: when a search last found the head (time.monotonic())

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of this head, also after a restart. A later search gives the same head the same identity."""
        if self.record is not None:
            return (str(self.record.user), *self.record.endpoints)
        return tuple(dict.fromkeys(endpoint for endpoint, _ in self.asked.ways)) or (self.address,)


@dataclass
class KnownHeads:
    """The heads that a search has found, and the problems of the search."""

    targets: list[StopTarget] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)  # faults that may hide a head; then the stop is incomplete
    notes: list[str] = field(default_factory=list)  # further remarks for people


def known_heads(given: str | None) -> KnownHeads:
    """Search for every head that this user may stop. If *given*, the value of --head, is not empty, return only the
    head that it names.
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
        shared = next((one for one in known.targets if _is_same_head(one, record)), None)
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
            there = [one.record for one in known.targets if one.record is not None and _listens_at(one, endpoint)]
            if all(record.user != os.geteuid() for record in there):
                known.targets.append(_named_head(endpoint, text, source, settings, there))
    return known


def settings_here(known: KnownHeads) -> Settings:
    """Return the settings of this process: from the environment and from the client file.

    If the environment or the file has a fault, append a text to ``known.troubles`` instead of raising an error, so that
    the heads of this machine still get the stop.
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
    """Return the head that --head, an environment variable or the client file names, ready to be asked.

    Args:
        endpoint: endpoint of the head.
        text: what the user wrote to name the head.
        source: the option, variable or file in which the user wrote it.
        settings: settings of this process.
        others: records with this endpoint that heads of other users wrote; only root reads these. If this process has
            no key for the head, or the endpoint is on loopback, the keys of those users are tried too. They are tried
            at this endpoint alone, since a record is no proof of where the head listens.
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
    """Return the routes to the head of *record*: each endpoint of the head, with the keys to use there. Unix sockets
    need no key. If this user's key for the head cannot be used, add a note to *known* and return the routes by unix
    sockets alone.
    """
    local: list[Route] = [(way, Security()) for way in record.ways if not is_tcp(way)]
    if record.user != os.geteuid():  # opening another user's key file may block
        return [*local, *((way, record.security) for way in record.ways if is_tcp(way))]
    try:
        security = record.security()
    except RlinfActorsError as error:
        known.notes.append(f"{record.address}: its key cannot be used: {error}")
        return local
    return [*local, *((way, security) for way in record.ways if is_tcp(way))]


def _is_same_head(target: StopTarget, record: HeadRecord) -> bool:
    """Return True if *record* was written for the same head as *target*: by the same user, with an endpoint of that
    head.

    The user must be the same, because otherwise a user could write a record with the endpoint of another user's head,
    and answer the stop in place of that head.
    """
    same_user = target.record is not None and target.record.user == record.user
    return same_user and any(_listens_at(target, way) for way in record.ways)


def _listens_at(target: StopTarget, endpoint: str) -> bool:
    """Return True if *endpoint* is one of the endpoints of the head of *target*."""
    ways = [*(target.record.endpoints if target.record is not None else ()), *(way for way, _ in target.asked.ways)]
    return any(way == endpoint or discovery.is_here(endpoint, way) for way in ways)


# --- the stop ---


def question_of(options: argparse.Namespace, wait: bool = False) -> EStop:
    return EStop(who(), options.reason, options.namespace, options.release, wait)


Answer = Union[EStopped, Status, Failed, str]
"""The answer of a head, or the reason why it has not answered."""


def ask_all(
    targets: Sequence[StopTarget], question: Body, then: EStop | None = None
) -> Iterator[tuple[StopTarget, Answer]]:
    """Connect to the heads *targets* and send *question* to each. Yield as `answers_to` does."""
    asker = BlockingClient()
    try:
        for target in targets:
            asker.ask(target.asked, question)  # goes out as soon as the head lets this process in
            asker.add(target.asked)
        yield from answers_to(asker, targets, then)
    finally:
        asker.close()


@dataclass
class _Open:
    """A head that has not answered: what it waits for or why it is not reached, and when it is given up."""

    target: StopTarget
    within_s: float
    awaited: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        self.until = time.monotonic() + self.within_s


def answers_to(
    asker: BlockingClient, targets: Sequence[StopTarget], then: EStop | None = None
) -> Iterator[tuple[StopTarget, Answer]]:
    """Yield each of *targets*, which have been asked through *asker*, with its answer when the answer arrives.

    A head that is not reached may be restarting, so it is yielded with the reason after DEADLINE_S; each second a line
    says why it is not reached. If *then* is given, a head whose answer names robot workers is asked that too, and
    yielded twice.
    """
    waiting = {target.asked: _Open(target, DEADLINE_S) for target in targets}
    say_at = time.monotonic() + 1.0
    while waiting:
        wake_at = min([say_at, *(one.until for one in waiting.values())])
        for event in asker.step(wake_at - time.monotonic())[0]:
            one = waiting.get(event.head)
            if one is None:
                continue
            if not isinstance(event, HeadAnswered):
                one.why = event.why if isinstance(event, HeadDown) else ""
            elif isinstance(event.body, (EStopped, Status, Failed)):
                del waiting[event.head]
                if then is not None and not one.awaited and isinstance(event.body, EStopped) and event.body.hits:
                    asker.ask(event.head, then)
                    awaited = "the ends of its robot workers are not confirmed"
                    waiting[event.head] = _Open(one.target, event.body.wait_s + LATE_S, awaited)
                else:
                    asker.drop(event.head)  # its further messages must not delay the other heads
                yield one.target, event.body
        now = time.monotonic()
        for one in [one for one in waiting.values() if now >= one.until]:
            del waiting[one.target.asked]
            how = "let this process in, but did not answer" if one.target.asked.up else "did not answer"
            yield one.target, (f"{one.why}, for" if one.why else f"it {how} within") + f" {one.within_s:.3g} s"
        if now >= say_at:
            say_at = now + 1.0
            for one in waiting.values():
                why = one.why or one.awaited or "it has not answered"
                say(f"waiting      {one.target.address}, {one.until - now:.0f} s more: {why}")


class Report:
    """Prints what came of the emergency stop: a line for each head as soon as its answer is known, or with *as_json*
    one JSON object at the end.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._clusters: dict[RemoteHead, dict[str, Any]] = {}
        self._without_job = 0  # heads that do not have the job of --job

    def add(self, target: StopTarget, answer: Answer) -> None:
        """Take a head's answer to the stop, or its second one, about the ends of its robot workers."""
        why = f"it refused: {answer.text}" if isinstance(answer, Failed) else str(answer)
        before = self._clusters.get(target.asked)
        if before is not None:
            if isinstance(answer, EStopped):
                before["unconfirmed"] = summary(answer)["hits"]
            else:
                before["error"] = f"it did not say what became of them: {why}"
            if not before["unconfirmed"]:
                self._line(f"STOPPED      {target.address}: {_counts(before)}")
            return
        said = answer if isinstance(answer, EStopped) else EStopped()
        done = said is answer
        cluster = {**_cluster(target), "acknowledged": done, "error": "" if done else why, **summary(said)}
        cluster["drivers"] = len({hit.namespace for hit in said.hits if hit.worker})
        cluster["robot_workers"] = sum(bool(hit.worker) for hit in said.hits)
        cluster["unconfirmed"] = cluster["hits"]
        self._clusters[target.asked] = cluster
        unknown = isinstance(answer, Failed) and answer.kind == "not_found"
        self._without_job += unknown
        word = ("stopping   " if said.hits else "STOPPED    ") if done else "NO SUCH JOB" if unknown else "NOT STOPPED"
        self._line(f"{word}  {target.address}: {_counts(cluster) if done else why} ({target.description})")
        for hit in cluster["hits"]:
            word = "NOT CONFIRMED" if hit["why"] else "stopping" if hit["reached"] else "NOT REACHED"
            self._line(f"  {word}: {_told(hit)}")
        for line in said.stopped:
            self._line(f"  in force: {line}")
        if said.warning:
            say(f"NOT ON DISK: {target.address}: {said.warning}")

    def end(self, known: KnownHeads) -> int:
        """Print the overall result of the emergency stop and return the exit code. *known* is the result of the search
        for heads.
        """
        clusters = list(self._clusters.values())
        done = sum(cluster["acknowledged"] for cluster in clusters)
        missing = len(clusters) - done - self._without_job
        kept = not any(cluster["warning"] for cluster in clusters)
        unconfirmed = any(cluster["unconfirmed"] for cluster in clusters)
        complete = done > 0 and not missing and not unconfirmed and not known.troubles and kept
        if self._as_json:
            hits = [hit for cluster in clusters for hit in cluster["hits"]]
            in_force = [line for cluster in clusters for line in cluster["in_force"]]
            warning = "; ".join(cluster["warning"] for cluster in clusters if cluster["warning"])
            data = {"clusters": clusters, "complete": complete, "troubles": known.troubles}
            print_json({**data, "hits": hits, "in_force": in_force, "warning": warning})
        for text in known.notes:
            say(f"note: {text}")
        for text in known.troubles:
            say(f"TROUBLE: {text}")
        for cluster in clusters:
            for hit in cluster["unconfirmed"]:
                say(f"NOT CONFIRMED: {_told(hit)}{cluster['error'] and '; '}{cluster['error']}")
        if not clusters:
            say(
                f"NOTHING WAS STOPPED: NO HEAD IS KNOWN. {MAY_MOVE} No head of this user runs on this machine, and "
                f"none is configured: name it by --head HOST:PORT, RLINF_HEAD, or /etc/{discovery.CLIENT_FILE}"
            )
        elif missing:
            say(f"{missing} OF {len(clusters)} HEADS DID NOT ACKNOWLEDGE THE EMERGENCY STOP. {MAY_MOVE}")
        elif not done:
            say(f"NOTHING WAS STOPPED: NO HEAD HAS THAT JOB. {MAY_MOVE}")
        elif unconfirmed or known.troubles:
            say(f"THE EMERGENCY STOP IS NOT CONFIRMED EVERYWHERE. {MAY_MOVE}")
        elif not kept:
            say("THE EMERGENCY STOP IS NOT ON DISK EVERYWHERE: PRESS AGAIN WHEN THAT HEAD HAS BEEN RESTARTED.")
        else:
            say("every known head has acknowledged" + (" that has this job" if self._without_job else ""))
        return SUCCESS if complete else UNAVAILABLE

    def _line(self, text: str) -> None:
        if not self._as_json:
            say(text, sys.stdout)


def _counts(cluster: dict[str, Any]) -> str:
    workers, left = cluster["robot_workers"], cluster["unconfirmed"]
    if not workers:
        return "no robot worker is known yet" if left else "no robot worker is running"
    what = f"{counted(workers, 'robot worker')} of {counted(cluster['drivers'], 'driver')}"
    return what if left else f"{what}; no process of theirs is left"


def _told(hit: dict[str, Any]) -> str:
    """Return a robot worker that is not certain to have ended, and why or how long that lasts, for people."""
    left = f"ends in {hit['lease_s']:.1f} s at the latest" if hit["lease_s"] else "is over"
    if not hit["worker"]:
        return f"robot workers on {hit['node']}, which has not come back to the restarted head; their lease {left}"
    where = f"{hit['worker']} of job {hit['namespace']} on {hit['node']} ({', '.join(hit['robots'])})"
    return f"{where}; {hit['why'] or f'its lease {left}'}"


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
    """Return the JSON object of a head's answer to an emergency stop. It is a part of the output of `estop --json`. Its
    keys are stable; new keys may be added.
    """
    hits = [msgspec.structs.asdict(hit) for hit in answer.hits]
    return {"hits": hits, "in_force": answer.stopped, "warning": answer.warning}


# --- output ---


def say(text: str, stream: TextIO | None = None) -> None:
    """Print *text*, a line for people, on *stream*, by default stderr."""
    print(printable(text, len(text)), file=stream or sys.stderr, flush=True)


def print_json(data: Any) -> None:
    print(json.dumps(data), flush=True)
