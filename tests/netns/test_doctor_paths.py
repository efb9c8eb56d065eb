"""`rlinf-actors doctor` on three hosts with keys: it measures paths, and names the direction that loses packets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import keyed_hosts
import netns_kit
import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]


def examine(host: netns_kit.Host, place: Path, address: str) -> dict:
    command = [sys.executable, "-m", "rlinf_actors.cli.main", "doctor", "--json", "--head", address]
    env = keyed_hosts.environment(place, "head")
    done = subprocess.run(host.command(command), env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_doctor_measures_paths_and_names_a_direction_that_is_blocked(place: Path) -> None:
    with netns_kit.hosts(3) as (head, far, third):
        address = f"{head.ip}:6399"
        nodes = keyed_hosts.two_nodes(head, far, place, address)
        try:
            nodes.append(keyed_hosts.joined(third, place, address, "third", 2))
            good = examine(head, place, address)
            assert [one["node"] for one in good["nodes"]][1:] == ["far", "third"]
            assert [one["there_bit_s"] > 0 < one["back_bit_s"] for one in good["paths"]] == [True] * 3
            assert [one for one in good["findings"] if one["check"] == "paths" and one["status"] == "fail"] == []
            assert all(abs(one["clock_offset_s"]) < 60 for one in good["nodes"])

            far.drop(third)  # one direction only; both still talk with the head
            (finding,) = [one for one in examine(head, place, address)["findings"] if one["status"] == "fail"]
            lost = f"packets from far (eth0, {far.ip}) to third (eth0, {third.ip}) are lost; the other direction works"
            assert finding["text"] == lost
            assert f"on third: nft list ruleset (or iptables -L INPUT) must admit {far.ip}" in finding["fix"]
        finally:
            for node in nodes:
                node.terminate()
            codes = [node.wait(30) for node in nodes]
    assert codes == [0] * len(codes)
