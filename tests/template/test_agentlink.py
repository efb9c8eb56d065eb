"""A template's connection to its agentd when there is no fd for another one."""

from __future__ import annotations

import os
import resource
import selectors
import socket

from rlinf_actors.wire import spawn
from rlinf_actors.wire.values import ExitReport
from rlinf_actors.worker.agentlink import AgentLink


def test_without_an_fd_for_an_agentd_nothing_spins_and_it_is_heard_later(tmp_path):
    path = str(tmp_path / "1.sock")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with selectors.DefaultSelector() as selector, ours, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        link = AgentLink(selector, theirs, path, 60.0, lambda packet: taken.append(packet) or True, lambda: None)
        link.start()

        def turn():
            ready = selector.select(0)
            for key, mask in ready:
                key.data(mask)
            return len(ready)

        other.connect(path)
        other.send(spawn.encode(spawn.Adopt()))
        spare = os.open("/dev/null", os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
        try:
            assert turn() == 1
            assert turn() == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            os.close(spare)
        link.send(spawn.Exited("a", ExitReport("exited")))
        assert (turn(), turn(), taken) == (1, 1, [spawn.Adopt()])
        link.refuse()
        link.close()
