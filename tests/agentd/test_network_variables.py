"""Which interface collectives on a node use. Pure."""

from __future__ import annotations

import pytest

from agentd.node import network_variables
from rlinf_actors.wire.values import HardwareReport, NodeReport, ResourceReport

LO, ETH, WLAN = {"lo": "127.0.0.1"}, {"eth0": "10.0.0.1"}, {"wlan0": "192.168.1.7"}


def report(interfaces, ip="10.0.0.1", kind=""):
    resources = [ResourceReport(kind, [HardwareReport(kind, "M")])] if kind else []
    return NodeReport("id", "n", ip, "h", 8, 0, "3.11", "py", interfaces=interfaces, resources=resources)


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (report({**LO, **ETH, **WLAN}), {}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        (report({**LO, **WLAN, **ETH}, "192.168.1.7"), {}, {"GLOO_SOCKET_IFNAME": "wlan0"}),
        (
            report({**LO, **ETH, **WLAN}, kind="NPU"),
            {},
            {"GLOO_SOCKET_IFNAME": "eth0", "HCCL_SOCKET_IFNAME": "eth0"},
        ),
        (report({**LO, **ETH, **WLAN}, kind="MY_TPU"), {}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        (report({**LO, **ETH, **WLAN}), {"GLOO_SOCKET_IFNAME": "ib0"}, {}),
        (
            report({**LO, **ETH, **WLAN}, kind="NV_GPU"),
            {"GLOO_SOCKET_IFNAME": "ib0"},
            {"NCCL_SOCKET_IFNAME": "eth0"},
        ),
        (report({**LO, **ETH}), {"RLINF_COMM_NET_DEVICES": "ib0,ib1"}, {"GLOO_SOCKET_IFNAME": "ib0,ib1"}),
        (report({**LO, **ETH}), {}, {}),  # there is no choice
        (report({**LO, **ETH, **WLAN}, "127.0.0.1"), {}, {}),  # the cluster does not leave this machine
        (report({**LO, **ETH, **WLAN}, "203.0.113.5"), {}, {}),  # an address in front of it, as --ip may give
    ],
)
def test_what_is_set(given, environ, expected):
    assert network_variables(given, environ) == expected
