"""A template's connection to its agentd: no fd for another one, and peers that its socket rejects."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile

import pace
import pytest

from rlinf_actors.template.agent_link import AgentLink
from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.values import ExitReport


def test_agentd_without_a_free_descriptor_is_accepted_later_without_spinning(tmp_path):
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
        other.send(template_protocol.encode(template_protocol.Adopt()))
        spare = os.open("/dev/null", os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
        try:
            assert turn() == 1
            assert turn() == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            os.close(spare)
        link.send(template_protocol.Exited("a", ExitReport("exited")))
        assert (turn(), turn(), taken) == (1, 1, [template_protocol.Adopt()])
        link.refuse()
        link.close()


class Template:
    """A link with a loop, and an agentd at its other end."""

    def __init__(self, path: str) -> None:
        self.agentd, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.link = AgentLink(self.selector, theirs, path, 60.0, self._taken, lambda: None)
        self.link.start()

    def _taken(self, packet: template_protocol.ToTemplate) -> bool:
        self.link.adopted()
        return True

    def turn(self) -> None:
        """As the template's, as long as something happens."""
        while ready := self.selector.select(0):
            for key, mask in ready:
                key.data(mask)

    def connected(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.connect(self.path)
        return made

    def close(self) -> None:
        self.link.close()
        self.selector.close()
        self.agentd.close()


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="t-") as made:
        yield made


@pytest.fixture
def template(place):
    made = Template(f"{place}/1.sock")
    yield made
    made.close()


def test_peer_that_is_no_agentd_is_rejected_and_logged(template, caplog):
    for said in (b"nonsense", template_protocol.encode(template_protocol.Shutdown()), b""):
        with template.connected() as stranger:
            if said:
                stranger.send(said)
            else:
                stranger.shutdown(socket.SHUT_WR)
            template.turn()
            assert stranger.recv(1) == b""
    assert caplog.messages == [
        f"refused a connection to this template's socket ({count} so far): its process is no agentd" for count in (1, 2)
    ]


def test_agentd_that_adopts_an_orphaned_template_has_its_connection(template, caplog):
    template.agentd.close()
    template.turn()
    assert template.link.orphaned
    with template.connected() as stranger:
        stranger.send(b"nonsense")
        template.turn()
        assert template.link.orphaned
    template.agentd = template.connected()
    template.agentd.send(template_protocol.encode(template_protocol.Adopt()))
    template.turn()
    assert not template.link.orphaned
    assert len(caplog.messages) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_rejected_process_of_another_user_is_logged_by_its_id(template, place, caplog):
    os.chmod(place, 0o755)  # as if its directory were open
    os.chmod(template.path, 0o777)
    script = "import os, socket, sys; os.setuid(61007); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)"
    script += "; s.connect(sys.argv[1]); s.recv(1)"
    with subprocess.Popen([sys.executable, "-c", script, template.path]) as other:
        assert template.selector.select(10)
        template.turn()
        assert other.wait(pace.PATIENCE_S) == 0
    assert caplog.messages == [
        "refused a connection to this template's socket (1 so far): its process belongs to user 61007"
    ]


RUN_TEMPLATE = """
import sys
from rlinf_actors.template import forked_workers, template
bug = sys.argv[3]
if bug:
    setattr(forked_workers.ForkedWorkers, bug, lambda self: 1 / 0)
template.OPTIONAL_IMPORTS = ()
template.main(int(sys.argv[1]), "n0", '{"agent": %s, "entry": "json:dumps"}' % sys.argv[2])
"""


def template_process(sock: socket.socket, bug: str = "") -> subprocess.Popen[str]:
    """A real template whose agentd is this process; the method of its ForkedWorkers called *bug* raises."""
    arguments = [str(sock.fileno()), str(os.getpid()), bug]
    command = [sys.executable, "-c", RUN_TEMPLATE, *arguments]
    return subprocess.Popen(command, pass_fds=[sock.fileno()], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("bug", ["probe", "check_ends"], ids=["message", "timer"])
def test_template_ends_with_70_by_an_internal_error(bug):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = template_process(theirs, bug)
        ours.send(template_protocol.encode(template_protocol.Probe()))
        _, said = process.communicate(timeout=pace.PATIENCE_S)
    assert process.returncode == 70
    assert "ZeroDivisionError" in said
    assert "internal error (above): this process ends" in said


def test_invalid_packet_does_not_end_the_template():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = template_process(theirs)
        ours.send(b"\x81\xa4type\xa7Unknown")
        ours.send(template_protocol.encode(template_protocol.Shutdown()))
        _, said = process.communicate(timeout=pace.PATIENCE_S)
    assert process.returncode == 0
    assert "dropped a packet of agentd" in said
