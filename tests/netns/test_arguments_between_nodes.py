"""Large arguments of a group call cross the network once for each node, and each rank runs the call once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import netns_kit
import partition_kit as pk
import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

SIZE = 8 << 20
LARGE = f"b'x' * {SIZE}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pk.Site]:
    with pk.site(tmp_path_factory.mktemp("site"), 2, 0, pk.SHORT) as made:
        yield made


@pytest.fixture(scope="module")
def driver(site: pk.Site) -> Iterator[pk.Driver]:
    with site.driver(site.hosts[0]) as made:
        yield made


def received(host: netns_kit.Host) -> int:
    """The bytes that have come to a host over its network interfaces."""
    lines = subprocess.run(host.command(["cat", "/proc/net/dev"]), capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in lines.splitlines() if ":" in line]
    return sum(int(row[1]) for row in rows if row[0] != "lo:")


def test_arguments_cross_the_network_once_for_a_node(site, driver):
    driver.ask("launch('calls', [1, 1, 1, 1])")
    before = received(site.hosts[1])
    for n in range(3):
        assert driver.ask(f"group('calls').count({LARGE}).wait(30)") == [n + 1] * 4
    assert received(site.hosts[1]) - before < 3 * 1.5 * SIZE
    driver.ask("group('calls').shutdown()")


@pytest.mark.parametrize("end", [signal.SIGKILL, None])
def test_rank_that_cannot_pass_arguments_on_fails_alone(site, driver, end):
    """The other ranks run the call, once; later calls find them in order."""
    name = f"group('passing{end or 0}')"
    first = driver.ask(f"launch('passing{end or 0}', [1, 1, 1])")[0]
    os.kill(first, signal.SIGSTOP)
    driver.ask(f"start('large', {name}.count({LARGE}))")
    driver.ask(f"start('next', {name}.execute_on(1, 2).count())")
    if end is not None:
        os.kill(first, end)
        assert driver.fails("end('large')").kind == "WorkerDiedError"
    assert driver.ask("end('next')") == [2, 2]
    if end is None:
        os.kill(first, signal.SIGCONT)
        assert driver.ask("end('large')") == [1, 1, 1]
    assert driver.ask(f"{name}.execute_on(1, 2).count().wait(30)") == [3, 3]
    driver.ask(f"{name}.shutdown()")
