"""The checks of `rlinf-actors doctor` on a cluster: nodes, versions, clocks, paths between nodes, keys. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from rlinf_actors.cli.doctor.cluster import ClusterFacts, End, Path
from rlinf_actors.cli.doctor.finding import FAIL, PASS, WARN, Check, Finding
from rlinf_actors.cli.doctor.node_checks import OF_NODES
from rlinf_actors.head.key_registry import WARNINGS_S
from rlinf_actors.model.readable import duration
from rlinf_actors.plurals import counted
from rlinf_actors.wire.check_values import Transfer
from rlinf_actors.wire.key_messages import KeyState

CLOCK_S = 0.1
"""Seconds by which clocks of two nodes may differ: events of logs then have the wrong order."""
SLOW = 1 / 3
"""A direction is slow if it has less than this part of the other direction, or of the median of all directions."""
OF_LINK = 0.25
"""A direction is slow if it has less than this part of its link's speed, or of FAST_MBIT_S if the link is faster."""
FAST_MBIT_S = 10_000
"""What one TCP connection reaches on any link."""
SHOWN_PATHS = 8
"""Most paths that have a line of their own if nothing is wrong with them."""
OLD_KEY_S = 365 * 86400.0
"""The check warns of keys of nodes and drivers that are older and never end."""


def states(cluster: ClusterFacts) -> list[Finding]:
    """State of the nodes: fails for a lost node, warns for a suspect one and for one that does not answer."""
    found = []
    for node in cluster.nodes:
        name, id = node.report.hostname, node.report.node_id
        seen = f"last heard of {duration(node.last_seen_s)} ago"
        if node.state == "lost":
            fix = "on it: systemctl status rlinf-agentd@USER, and `rlinf-actors doctor`; `rlinf-actors events --node "
            found.append(Finding("nodes", FAIL, f"node {name} is lost, {seen}", f"{fix}{name}` says why", (name,)))
        elif node.state == "suspect":
            fix = f"look at the network and the load of {node.report.ip}; it is lost if it stays silent"
            found.append(Finding("nodes", WARN, f"node {name} is silent, {seen}", fix, (name,)))
        elif id in cluster.faults:
            fix = "look at its agentd's log (`rlinf-actors logs --node NODE`)"
            found.append(Finding("nodes", WARN, f"node {name}: {cluster.faults[id]}", fix, (name,)))
        elif node.draining:
            found.append(Finding("nodes", PASS, f"node {name} is being drained: {node.draining}", "", (name,)))
    good = len(cluster.facts)
    return found or [Finding("nodes", PASS, counted(good, "node", "answers|answer"))]


def machines(cluster: ClusterFacts) -> list[Finding]:
    """The checks of one machine, for each node. What several nodes have in common is said once."""
    found: dict[Finding, list[str]] = {}
    for id, facts in cluster.facts.items():
        for finding in (finding for check in OF_NODES for finding in check.run(facts)):
            if finding.status != PASS:
                found.setdefault(finding, []).append(cluster.name(id))
    return [
        replace(finding, text=f"node{'s' * (len(names) > 1)} {_few(names)}: {finding.text}", nodes=tuple(names))
        for finding, names in found.items()
    ]


HERE = "this machine"
Versions = dict[str, dict[str, list[str]]]
"""For each package, the versions and the places (node, or interpreter of a node) that have them."""


def table(cluster: ClusterFacts) -> Versions:
    """Return the versions of all packages on all nodes, and on this machine, whose drivers pickle for the nodes.

    Interpreters that a job chose are places of their own.
    """
    found: Versions = {}
    here = {HERE: cluster.here} if cluster.here is not None else {}
    for node, facts in {**{cluster.name(id): facts for id, facts in cluster.facts.items()}, **here}.items():
        found.setdefault("rlinf-actors", {}).setdefault(facts.version, []).append(node)
        own = {one.path: {"python": one.python, **one.packages} for one in facts.interpreters if one.own}
        for one in facts.interpreters:
            agentd = own.get(one.path, {})
            for package, version in {"python": one.python, **one.packages}.items():
                if package == "python" and agentd.get(package, "").startswith(f"{version}."):
                    version = agentd[package]  # interpreters of jobs tell 3.11, agentd's own 3.11.7
                place = node if one.own or agentd.get(package) == version else f"{node} ({one.path})"
                places = found.setdefault(package, {}).setdefault(version, [])
                if place not in places:
                    places.append(place)
    return found


def versions(cluster: ClusterFacts) -> list[Finding]:
    """Versions of Python and of packages on the nodes and this machine: warns for each that is not the same everywhere.

    The packages are those that this library and torch's jobs need, and those that a running job preloads. A node that
    lacks a package counts as different, because a worker that imports it fails there.
    """
    found = []
    for package, places in sorted(table(cluster).items()):
        known = dict(places)
        if package == "python":  # interpreters of jobs tell 3.11, agentd's own 3.11.7
            known = {}
            for version, names in places.items():
                known.setdefault(".".join(version.split(".")[:2]), []).extend(names)
            known.pop("", None)
        if len(known) < 2:
            continue
        most = max(known, key=lambda version: (version != "", len(known[version])))
        texts = [f"{version or 'none'} on {_few(names)}" for version, names in sorted(known.items())]
        others = [name for version, names in known.items() if version != most for name in names]
        fix = f"on {_few(others)}: "
        fix += f"use Python {most}" if package == "python" else f"python -m pip install {package}=={most}"
        found.append(Finding("versions", WARN, f"{package} differs: {'; '.join(texts)}", fix))
    many = len(cluster.facts)
    return found or [Finding("versions", PASS, f"Python and packages are the same on {counted(many, 'node')}")]


def _few(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:5]) + (f" and {counted(len(names) - 5, 'other')}" if len(names) > 5 else "")


def clocks(cluster: ClusterFacts) -> list[Finding]:
    """Difference between the nodes' clocks, by round trips through the head: warns from a tenth of a second on."""
    head = next((node.report.node_id for node in cluster.nodes if node.is_head), "")
    base = cluster.clocks.get(head) or next(iter(cluster.clocks.values()), None)
    found, largest = [], 0.0
    for id, clock in cluster.clocks.items():
        assert base is not None
        offset_s, error_s = clock.offset_s - base.offset_s, clock.error_s + base.error_s
        largest = max(largest, abs(offset_s))
        if abs(offset_s) - error_s > CLOCK_S:
            way = "ahead of" if offset_s > 0 else "behind"
            text = f"the clock of node {cluster.name(id)} is {abs(offset_s):.2f} s {way} that of the head's node"
            fix = "on both: timedatectl set-ntp true; chronyc makestep sets it at once"
            found.append(Finding("clocks", WARN, f"{text} (error at most {error_s:.3f} s)", fix, (cluster.name(id),)))
    if len(cluster.clocks) < 2:
        return []
    return found or [Finding("clocks", PASS, f"the nodes' clocks differ by at most {largest * 1000:.0f} ms")]


# --- paths ---


def paths(cluster: ClusterFacts) -> list[Finding]:
    """Network between nodes, in both directions: fails if a direction loses packets or no connection comes about.

    Warns of a direction that is slow: less than a third of the opposite direction or of the median of all, or less than
    a quarter of the speed of its interface (10 Gbit/s for faster ones, which one connection does not fill).
    """
    rates = [rate for path in cluster.paths for rate in (speed(path.answer.there), speed(path.answer.back)) if rate]
    median = statistics.median(rates) if len(rates) >= 6 else 0.0
    found: list[Finding] = []
    for path in cluster.paths:
        found += _broken(cluster, path) if path.answer.fault else _slow(cluster, path, median)
    good = [path for path in cluster.paths if not path.answer.fault]
    if len(good) <= SHOWN_PATHS:
        found += [Finding("paths", PASS, outcome(cluster, path)) for path in good]
    else:
        text = f"{len(good)} paths have {shown(min(rates))} to {shown(max(rates))}, in the middle {shown(median)}"
        found.append(Finding("paths", PASS, text))
    if cluster.untested and len(cluster.facts) > 1:
        found.append(Finding("paths", PASS, f"paths between nodes: {cluster.untested}"))
    return found


def speed(transfer: Transfer) -> float:
    """Return bits in a second, 0 if nothing arrived."""
    return transfer.size * 8 / transfer.seconds if transfer.size and transfer.seconds > 0 else 0.0


def shown(rate: float) -> str:
    return f"{rate / 1e9:.1f} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.0f} Mbit/s"


def place(cluster: ClusterFacts, end: End, source: str = "") -> str:
    """Return a node with its address and interface, as text. *source* is the address from which it connected."""
    ip = source or end.ip
    facts = cluster.facts.get(end.id)
    name = next((one.name for one in facts.interfaces if one.ip == ip), "") if facts is not None else ""
    return f"{end.node} ({', '.join(filter(None, (name, ip)))})"


def outcome(cluster: ClusterFacts, path: Path) -> str:
    answer = path.answer
    ends = f"{place(cluster, path.near, answer.source)} to {place(cluster, path.far)}"
    rates = f"{shown(speed(answer.there))} there, {shown(speed(answer.back))} back"
    return f"{ends}: {rates}, round trip {answer.rtt_s * 1000:.2f} ms"


def _broken(cluster: ClusterFacts, path: Path) -> list[Finding]:
    near, far = place(cluster, path.near), place(cluster, path.far)
    if path.there is None or path.back is None:
        fix = f"look at the firewalls of both (nft list ruleset), and `ip route get {path.far.ip}` on {path.near.node}"
        return [Finding("paths", FAIL, f"no connection from {near} to {far}: {path.answer.fault}", fix)]
    if path.there and path.back:
        fix = f"a stateful firewall or different routes of the two directions: `ip route get {path.far.ip}` on "
        fix += f"{path.near.node}, `ip route get {path.near.ip}` on {path.far.node}"
        text = f"packets arrive in both directions, but no connection comes about between {near} and {far}"
        return [Finding("paths", FAIL, text, fix)]
    if not path.there and not path.back:
        fix = f"look at cables and switches; `ip route get {path.far.ip}` on {path.near.node}; nft list ruleset on both"
        return [Finding("paths", FAIL, f"no packets arrive between {near} and {far}, in either direction", fix)]
    lost_at, lost_from = (path.far, path.near) if not path.there else (path.near, path.far)
    text = f"packets from {place(cluster, lost_from)} to {place(cluster, lost_at)} are lost; the other direction works"
    fix = f"on {lost_at.node}: nft list ruleset (or iptables -L INPUT) must admit {lost_from.ip}; on {lost_from.node}: "
    fix += f"`ip route get {lost_at.ip}`, `ip neigh show {lost_at.ip}`; then the switch between them"
    return [Finding("paths", FAIL, text, fix)]


def _slow(cluster: ClusterFacts, path: Path, median: float) -> Iterator[Finding]:
    answer = path.answer
    directions = (
        (path.near, answer.source, path.far, "", answer.there, answer.back),
        (path.far, "", path.near, answer.source, answer.back, answer.there),
    )
    links = [one.mbit_s for one in (path.near, path.far) if one.mbit_s]
    link = min([*links, FAST_MBIT_S]) * 1e6 if links else 0.0
    for near, near_ip, far, far_ip, this, opposite in directions:
        rate, other = speed(this), speed(opposite)
        why = ""
        if rate < SLOW * other:
            why = f"the opposite direction has {shown(other)}"
        elif rate < SLOW * median:
            why = f"half of the directions have {shown(median)} or more"
        elif rate < OF_LINK * link:
            why = f"its link has {shown(min(links) * 1e6)}"
        if why:
            sender, receiver = place(cluster, near, near_ip), place(cluster, far, far_ip)
            text = f"{sender} to {receiver} is slow: {shown(rate)}; {why}"
            fix = f"on both: ethtool INTERFACE (speed, duplex), `ip -s link` (errors, drops); CPU load of {far.node}"
            yield Finding("paths", WARN, text, fix)


def interfaces(cluster: ClusterFacts) -> list[Finding]:
    """Network interfaces of the nodes: warns of links that are down, of errors, and of different MTUs of a network."""
    found = []
    mtus: dict[str, dict[int, list[str]]] = {}
    for id, facts in cluster.facts.items():
        node = cluster.name(id)
        for one in facts.interfaces:
            if not one.up:
                text = f"node {node}: the link of {one.name} ({one.ip}) is down"
                found.append(
                    Finding("interfaces", WARN, text, f"ip link set {one.name} up; look at its cable", (node,))
                )
            if one.received_errors + one.sent_errors:
                text = f"node {node}: {one.name} had {one.received_errors} receive and {one.sent_errors} send errors"
                fix = f"ethtool -S {one.name} says which; change the cable or the transceiver"
                found.append(Finding("interfaces", WARN, text, fix, (node,)))
    for path in cluster.paths:
        for end in (path.near, path.far):
            for one in cluster.facts[end.id].interfaces:
                if one.ip == end.ip:
                    mtus.setdefault(f"{path.near.node} and {path.far.node}", {}).setdefault(one.mtu, []).append(
                        f"{end.node} ({one.name})"
                    )
    for pair, sizes in mtus.items():
        if len(sizes) > 1:
            texts = ", ".join(f"{size} on {_few(places)}" for size, places in sorted(sizes.items()))
            fix = "give both ends the same MTU: ip link set INTERFACE mtu SIZE"
            found.append(Finding("interfaces", WARN, f"{pair} have different MTUs: {texts}", fix))
    count = sum(len(facts.interfaces) for facts in cluster.facts.values())
    what = counted(count, "network interface", "is up and has|are up and have")
    return found or [Finding("interfaces", PASS, f"{what} no errors")]


def keys(cluster: ClusterFacts) -> list[Finding]:
    """Keys and join tokens that the head lists: warns of keys that end in two weeks, or are older than a year.

    Only the administrator, with the head's own key, sees them.
    """
    if cluster.keys is None or not cluster.keys.head:
        return []
    now = cluster.keys.at
    valid = [key for key in cluster.keys.keys if key.ended_at is None]
    found = []
    for key in [key for key in valid if not key.token]:
        ends = min((at for at in (key.limits.until, key.expires_at) if at is not None), default=None)
        if ends is not None and ends - now < WARNINGS_S[0]:
            fix = f"on the head's machine: rlinf-actors keys enroll {key.name}{_option(key)} --replace"
            found.append(Finding("cluster_keys", WARN, f"the key of {_whose(key)} ends in {duration(ends - now)}", fix))
        elif ends is None and now - key.added_at > OLD_KEY_S:
            text = f"the key of {_whose(key)} is {duration(now - key.added_at)} old"
            found.append(Finding("cluster_keys", WARN, text, f"as {key.name}: rlinf-actors keys rotate"))
    tokens = [key for key in valid if key.token]
    text = f"{counted(len(valid) - len(tokens), 'key')} and {counted(len(tokens), 'open join token')}"
    if tokens:
        last_s = max((key.expires_at or now) - now for key in tokens)
        text += f" (of {_few([key.name for key in tokens])}; the last ends in {duration(last_s)})"
    return found or [Finding("cluster_keys", PASS, text)]


def _whose(key: KeyState) -> str:
    return f"{'node' if key.role == 'agent' else key.role} {key.name}"


def _option(key: KeyState) -> str:
    return "" if key.role == "agent" else f" --{key.role}"


CLUSTER_CHECKS: tuple[Check[ClusterFacts], ...] = (
    Check(("nodes",), states),
    Check(("versions",), versions),
    Check(("clocks",), clocks),
    Check(("interfaces",), interfaces),
    Check(("paths",), paths),
    Check(("cluster_keys",), keys),
    Check(tuple(name for check in OF_NODES for name in check.names), machines),
)
"""The checks on a cluster."""


def diagnose_cluster(cluster: ClusterFacts) -> list[Finding]:
    return [finding for check in CLUSTER_CHECKS for finding in check.run(cluster)]
