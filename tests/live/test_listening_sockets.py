"""Every listening socket of a running cluster is in the table of docs/explanation/security.md, and behaves so."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import attacked_workers
import live_workers as lw
import pace
import pytest
from listening import Listening, listening

from rlinf_actors import NodePlacementStrategy, procfs
from rlinf_actors.net.link import LinkOptions
from rlinf_actors.net.local_network import LocalNetwork
from rlinf_actors.net.socket_security import Security
from rlinf_actors.net.unix_sockets import SUFFIX
from rlinf_actors.net.zmq_network import ZmqNetwork
from rlinf_actors.settings import LOCAL_LINK
from rlinf_actors.testing import LocalCluster
from rlinf_actors.wire import child_protocol, frames
from rlinf_actors.wire.protocol import PROTOCOL

pytestmark = pytest.mark.live

CHILDREN = "a worker's, for its children"
STREAMS = "a worker's, for unix streams"


def documented() -> set[tuple[str, str]]:
    """The first two columns of the table."""
    text = (lw.ROOT / "docs/explanation/security.md").read_text().partition("\n## Sockets\n")[2]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    return {(whose.strip(), where.strip()) for whose, where in rows[1:]}


def row(socket: Listening, local: LocalCluster) -> tuple[str, str]:
    """Which row of the table a socket is of; fails for one that is of none."""
    rows = documented()
    agents = {node.pid: node.run_dir for node in local.nodes}
    if socket.port:
        assert agents.get(socket.pid) == local.nodes[0].run_dir, f"only the head listens on loopback, not {socket}"
        assert f"{socket.host}:{socket.port}" == local.head
        return next(row for row in rows if row[0] == "the head's" and row[1].startswith("TCP"))
    found = [node.run_dir for node in local.nodes if socket.path.startswith(f"{node.run_dir}/")]
    assert found, f"{socket} is not in a run directory"
    folder, name = os.path.split(os.path.relpath(socket.path, found[0]))
    if folder == "w" and name.endswith("_"):
        assert (CHILDREN, "`RUN_DIR/w/ID_`") in rows
        return CHILDREN, "`RUN_DIR/w/ID_`"
    if folder == "w" and name.endswith(SUFFIX):
        assert (STREAMS, "`RUN_DIR/w/ID_u`") in rows
        return STREAMS, "`RUN_DIR/w/ID_u`"
    whose, where = {
        ("", "head"): ("the head's", "`RUN_DIR/head`"),
        ("w", name): ("a worker's", "`RUN_DIR/w/ID`"),
        ("t", name): ("a template's, for the next agentd", "`RUN_DIR/t/*.sock`"),
        ("", "keeper"): ("a keeper's, for its agentd and the next", "`RUN_DIR/keeper`"),
    }[folder, name]
    assert (whose, where) in rows
    return whose, where


def test_listening_sockets_are_those_of_the_security_page(monkeypatch):
    monkeypatch.delenv(LOCAL_LINK, raising=False)  # also those of unix streams, which are the default
    with LocalCluster(2, env={"PYTHONPATH": str(Path(__file__).parent)}) as local:
        cluster = local.cluster()
        group = attacked_workers.Counter.create_group().launch(
            cluster, placement_strategy=NodePlacementStrategy([0, 1]), name="counters"
        )
        group.hit().wait()
        everybody = {pid: None for node in local.nodes for pid in procfs.subtree(node.pid)}
        found = listening(everybody)
        kinds = {row(socket, local) for socket in found}
        assert {whose for whose, _ in kinds} == {
            "the head's", "a worker's", CHILDREN, STREAMS, "a template's, for the next agentd",
            "a keeper's, for its agentd and the next",
        }  # fmt: skip
        assert len(found) == 2 + 2 + 2 + 2 + 2 + 2, found
        for socket in found:
            if socket.port:
                assert socket.speaks("CURVE")
                assert not socket.speaks("NULL")
                continue
            folder = Path(socket.path).parent
            assert folder.stat().st_mode & 0o777 == 0o700 or folder.parent.stat().st_mode & 0o777 == 0o700, folder
            assert folder.stat().st_uid == os.geteuid()
            if socket.stream:
                assert socket.speaks("NULL") is not socket.path.endswith(SUFFIX)
        assert not listening([os.getpid()]), "a driver listens nowhere"
        for rank, pid in enumerate(group.pid().wait()):
            assert pid in {socket.pid for socket in found if socket.path.startswith(f"{local.nodes[rank].run_dir}/w/")}
        check_refusals(group, local, found)


def check_refusals(group: Any, local: LocalCluster, sockets: list[Listening]) -> None:
    """A process of this user that connects to a unix socket and is no member: the socket's owner logs the refusal."""
    by_path = {socket.path: socket for socket in sockets if socket.path}
    workers = [path for path in by_path if Path(path).parent.name == "w" and not path.endswith(("_", SUFFIX))]
    for_children = [path for path in by_path if path.endswith("_")]
    templates = [path for path in by_path if Path(path).parent.name == "t"]
    for path in workers:
        for network in (ZmqNetwork, LocalNetwork):
            assert "does not belong to the job of counters" in asyncio.run(joined(f"ipc://{path}", network))
    for path in templates:
        with by_path[path].connect() as stranger:
            stranger.sendall(b"this is no agentd")
            assert stranger.recv(1) == b""
    for path in for_children:
        with by_path[path].connect() as stranger:
            assert "which alone admits its own children" in child_protocol.decode_answer(stranger.recv(4096)).text
            assert stranger.recv(1) == b""
    logs = [path.read_text() for node in local.nodes for path in Path(node.run_dir).glob("t/*.err")]
    assert len([text for text in logs if "this template's socket (1 so far): its process is no agentd" in text]) == 2
    group.shutdown()  # the workers' last output is in the files then
    for rank, node in enumerate(local.nodes):
        (path,) = Path(node.log_dir).rglob(f"counters-{rank}.err")
        text = path.read_text()
        assert "refused the link 'driver:stranger': it does not have its job's token (1 so far)" in text


async def joined(endpoint: str, kind: type[ZmqNetwork]) -> str:
    """What a worker answers to a stranger's Join."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    network = kind(asyncio.get_running_loop(), Security())
    try:
        received = lambda peer, header, parts: told.set_result(frames.decode(header).text)  # noqa: E731
        link = network.link(endpoint, b"driver:stranger#1", received, LinkOptions(to="counters:0"))
        link.send(frames.encode(frames.Join(PROTOCOL, "1", "3.11", "driver:stranger", "a guess", "g-0")))
        return await asyncio.wait_for(told, pace.PATIENCE_S)
    finally:
        network.close()
