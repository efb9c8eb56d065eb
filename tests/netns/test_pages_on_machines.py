"""Pages whose commands start daemons run as they are written, on machines with a network of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import netns_kit
import page_blocks
import pytest
from page_machine import Machine

pytestmark = [
    pytest.mark.netns,
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not netns_kit.can_make_namespaces(), reason="needs root and ip netns"),
]

DOCS = page_blocks.ROOT / "docs"


def commands(page: Path) -> list[str]:
    """The commands of a page that run."""
    return [line for one in page_blocks.blocks(page, "") if not one.reason for line in one.lines]


def program(page: Path, name: str) -> str:
    """The program of a page that says its name."""
    [text] = [one.text for one in page_blocks.blocks(page, "python") if one.file == name]
    return text


@pytest.fixture
def machines(place: Path) -> Iterator[list[Machine]]:
    """Three homes: of the head's machine, of another machine, and of another user there."""
    with netns_kit.wired([{"eth0": ("br0", [f"10.0.0.{n}/24"])} for n in (1, 2)]) as hosts:
        made = [Machine(host, place / name) for host, name in ((hosts[0], "a"), (hosts[1], "b"), (hosts[1], "c"))]
        try:
            yield made
        finally:
            for machine in made:
                machine.kill()


def test_two_nodes_of_one_machine_play(machines: list[Machine], place: Path) -> None:
    """docs/tutorial/two-nodes.md, and "Several nodes" of README.md, which begins in the same way."""
    page, here, other = DOCS / "tutorial" / "two-nodes.md", machines[0], f"{place}/node1"
    place.joinpath("a", "two.py").write_text(program(page, "two.py"))
    place.joinpath("a", "train.py").write_text(program(DOCS / "how-to" / "run-a-program.md", "train.py"))
    first, second, nodes, play, events = commands(page)
    *again, train = commands(page_blocks.ROOT / "README.md")[-3:]
    assert again == [first, second]
    here.run_daemon(first)
    here.run_daemon(second.replace("/tmp/node1", other))
    listed, shown = (one.text for one in page_blocks.blocks(page, "text"))
    head, *rows = here.run(nodes)[0].splitlines()
    assert head.split() == listed.splitlines()[0].split()
    assert [row.split()[0] for row in rows] == ["-", "-"]
    assert here.run(play)[0] == shown
    assert here.run(nodes)[0].count(" (rank ") == 2
    assert here.run(train)[0] == "[0]\n"  # it waits for one node
    assert "players" in here.run(events)[0]
    here.interrupt()


def test_keys_are_made_change_and_end(machines: list[Machine]) -> None:
    """docs/how-to/set-up-keys.md, and what needs its keys on other pages.

    What its later parts say of gpu-1 and kim is about others here.
    """
    head, node, user = machines
    init, listen, enroll_node, join_node, enroll_user, join_user, *later = commands(DOCS / "how-to" / "set-up-keys.md")
    head.run(init)
    head.run_daemon(listen, "10.0.0.1:6380")
    node.run_daemon(join_node.replace("TOKEN", head.run(enroll_node)[0].split()[-1]))
    user.run(join_user.replace("TOKEN", head.run(enroll_user)[0].split()[-1]))
    viewer, grouped, limited, expiring, next_key, listed, revoke, rotate = later
    assert "wall-screen" in head.run(viewer)[1]
    head.run(grouped.replace("kim", "ann"))
    head.run(limited)
    head.run(expiring.replace("gpu-1", "gpu-2"))
    head.run(next_key)
    shown = head.run(listed.replace("[--all]", "--all"))[0]
    assert all(name in shown for name in ("gpu-1", "kim"))
    user.run(rotate)
    head.run(revoke.replace("NAME", "kim"))
    [firewall] = commands(DOCS / "reference" / "files-and-ports.md")
    head.run(firewall)
    assert viewer in commands(DOCS / "how-to" / "watch-a-cluster.md")
    node.interrupt()
    head.interrupt()
    first, second = (line for line in commands(DOCS / "how-to" / "rlinf.md") if "agentd" in line)
    head.run_daemon(first)
    user.run(join_user.replace("TOKEN", head.run(enroll_node)[0].split()[-1]))
    user.run_daemon(second)
    user.interrupt()
    head.interrupt()
