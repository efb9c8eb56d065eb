"""What an interpreter that cannot run workers says. Its code is also read by interpreters that are too old."""

import os
import sys

from rlinf_actors.template import bootstrap
from rlinf_actors.wire import template_protocol


def test_what_is_missing_is_named_with_the_command_that_installs_it():
    def importer(name):
        if name != "cloudpickle":
            raise ModuleNotFoundError(f"No module named {name!r}")

    text = bootstrap.check("n0", (3, 12), importer)
    assert text.startswith(f"interpreter {sys.executable} on node n0 has no pyzmq, msgspec: ")
    assert f"run '{sys.executable} -m pip install pyzmq msgspec'" in text
    assert "No module named 'zmq'" in text
    assert bootstrap.check("n0", (3, 12), lambda name: None) == ""


def test_old_python_is_named():
    assert "is Python 3.8; workers need Python 3.10 or newer" in bootstrap.check("n0", (3, 8), lambda name: None)


def test_a_32_bit_python_is_named():
    text = bootstrap.check("n0", (3, 12), lambda name: None, (1 << 31) - 1)
    assert "is a 32-bit program; workers need a 64-bit one" in text


def test_failure_is_a_packet(monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    for text in ("", "é" * 40_000):
        reader, writer = os.pipe()
        bootstrap.fail(writer, text)
        os.close(writer)
        with open(reader, "rb") as file:
            packet = template_protocol.decode_to_agent(file.read())
        assert isinstance(packet, template_protocol.TemplateFailed)
        assert text.startswith(packet.text)
        assert len(packet.text) == min(len(text), 30_000)
