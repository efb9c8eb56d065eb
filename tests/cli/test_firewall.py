"""The rules that `units print --firewall` writes: which addresses and ports, and that nft takes them."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess

import pytest

from rlinf_actors.cli import firewall
from rlinf_actors.errors import ConfigError
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.values import GroupState, NodeReport, NodeState, WorkerState

RANGE = "40000-50000"


def node(rank, ip, state="ready", **more):
    report = NodeReport(f"n{rank}", f"host{rank}", ip, "host", 1, 1, "3.11", "/usr/bin/python3", **more)
    return NodeState(report, "i", rank, state, 0.0)


def written(monkeypatch, nodes, namespaces=(), peers=(), ports=RANGE, endpoint="tcp://10.0.0.1:6380"):
    workers = [WorkerState("w", 0, 1, "10.0.0.2", "running"), WorkerState("v", 1, 0, "10.0.0.1", "gone")]
    groups = [GroupState("job", "g", "m:C", "o", "running", workers)]
    status = Status("e", "1", 1.0, nodes, groups, [])
    monkeypatch.setattr(firewall, "status_of", lambda head: (endpoint, status))
    return firewall.of_cluster(None, namespaces, peers, ports)


def elements(text, name):
    [line] = [line for line in text.splitlines() if f"set {name} " in line]
    return line.partition("elements = { ")[2].partition(" }")[0]


NODES = [
    node(0, "10.0.0.1", interfaces={"eth0": "10.0.0.1", "docker0": "172.17.0.1"}, interface="eth0"),
    node(1, "10.0.0.2", interfaces={"eth0": "10.0.0.2", "ib0": "10.9.0.2"}, interface="eth0",
         env_vars={"RLINF_COMM_NET_DEVICES": "ib0"}),
    node(2, "fd00::3"),
    node(-1, "10.0.0.4", "lost"),
]  # fmt: skip


def test_rules_admit_the_addresses_that_living_nodes_use(monkeypatch):
    text = written(monkeypatch, NODES, peers=["192.168.7.0/24"])
    for name in ("nodes", "peers"):
        assert elements(text, f"{name}4") == "10.0.0.1/32, 10.0.0.2/32, 10.9.0.2/32, 192.168.7.0/24"
        assert elements(text, f"{name}6") == "fd00::3/128"
    assert "tcp dport { 6380, 40000-50000 } counter drop" in text


@pytest.mark.parametrize(
    ("value", "more"),
    [("ib0", "10.9.0.2"), ("ib", "10.9.0.2"), ("=ib0", "10.9.0.2"), ("^docker,eth", "10.9.0.2"), ("=ib", ""), ("", "")],
)
def test_interfaces_are_named_as_nccl_reads_it(value, more):
    interfaces = {"eth0": "10.0.0.2", "ib0": "10.9.0.2", "docker0": "172.17.0.1"}
    one = node(1, "10.0.0.2", interfaces=interfaces, interface="eth0", env_vars={"NCCL_SOCKET_IFNAME": value})
    assert {str(found.network_address) for found in firewall.addresses(one.report)} == {"10.0.0.2", more} - {""}


@pytest.mark.parametrize("ip", ["0.0.0.0/0", "10.0.0.0/8", "10.0.0.1 } ; accept", ""])
def test_a_node_that_names_a_network_opens_no_ports(monkeypatch, ip):
    """A node states its addresses itself: its network would admit all machines there to the ports of all nodes."""
    lying = [node(0, ip), node(1, "10.0.0.2", interfaces={"eth0": ip}, interface="eth0")]
    for one in lying:
        with pytest.raises(ConfigError, match="and no address") as refusal:
            written(monkeypatch, [one, NODES[2]])
        assert one.report.node_id in str(refusal.value)


def test_rules_of_a_job_admit_to_workers_only_the_nodes_where_it_runs(monkeypatch):
    text = written(monkeypatch, NODES, namespaces=["job"], peers=["10.0.0.9"])
    assert elements(text, "peers4") == "10.0.0.2/32, 10.0.0.9/32, 10.9.0.2/32"
    assert elements(text, "peers6") == ""
    assert elements(text, "nodes4") == "10.0.0.1/32, 10.0.0.2/32, 10.0.0.9/32, 10.9.0.2/32"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peers": ["10.0.0.1; drop"]}, "--peer"),
        ({"nodes": [node(0, "10.0.0.1 } ; flush ruleset")]}, "address of node n0"),
        ({"ports": "5-"}, "FIRST-LAST"),
        ({"ports": "6-5"}, "FIRST-LAST"),
        ({"ports": "0-70000"}, "FIRST-LAST"),
        ({"namespaces": ["jab"]}, "a job without groups"),
        ({"endpoint": "ipc:///run/x/head"}, "unix socket"),
    ],
)
def test_what_is_no_address_port_or_job_is_refused(monkeypatch, options, said):
    with pytest.raises(ConfigError, match=said):
        written(monkeypatch, **{"nodes": NODES, **options})


@pytest.mark.skipif(shutil.which("nft") is None or os.geteuid() != 0, reason="needs root and nft")
@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("head_port", [6380, 45000])
def test_nft_takes_the_rules(tmp_path, count, head_port):
    file = tmp_path / "rules"
    peers = [ipaddress.ip_network(f"10.0.{n}.1") for n in range(count)]
    file.write_text(firewall.rules(head_port, (40000, 50000), peers, peers))
    done = subprocess.run(["unshare", "-n", "nft", "-c", "-f", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
