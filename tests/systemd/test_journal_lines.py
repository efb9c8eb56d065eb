"""Log lines have priorities if the journal reads stderr, else they are plain. Real pipes and files."""

from __future__ import annotations

import os
import subprocess
import sys

import pace
import pytest

from rlinf_actors.systemd.service_manager import marked, reads

CODE = """
import logging, sys
from rlinf_actors import settings
from rlinf_actors.systemd.service_manager import DaemonStderr
voice = DaemonStderr("agentd", sys.stderr, settings.Unit.load().journal_stream)
voice.set_up_logging(logging.DEBUG)
log = logging.getLogger("x")
log.debug("d")
log.info("i")
log.warning("two\\nlines")
log.error("e")
try:
    raise ValueError("why")
except ValueError:
    log.exception("failed")
voice.say("the end")
"""


def run(stderr, journal_stream: str) -> None:
    env = {**os.environ, "JOURNAL_STREAM": journal_stream}
    subprocess.run([sys.executable, "-c", CODE], env=env, stderr=stderr, check=True, timeout=pace.PATIENCE_S)


def stream_of(fd: int) -> str:
    found = os.fstat(fd)
    return f"{found.st_dev}:{found.st_ino}"


def written(tmp_path, kind, right) -> list[str]:
    if kind == "file":
        with open(tmp_path / "log", "w+") as file:
            run(file, stream_of(file.fileno()) if right else "1:2")
            file.seek(0)
            return file.read().splitlines()
    read, write = os.pipe()
    with os.fdopen(read) as reader:
        with os.fdopen(write, "w") as writer:
            run(writer, stream_of(write) if right else "1:2")
        return reader.read().splitlines()


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_each_line_has_its_priority(tmp_path, kind):
    lines = written(tmp_path, kind, right=True)
    assert lines[:5] == ["<7>DEBUG: d", "<6>INFO: i", "<4>WARNING: two", "<4>    lines", "<3>ERROR: e"]
    assert lines[5] == "<3>ERROR: failed"
    assert all(line.startswith("<3>") for line in lines[5:])
    assert lines[-2:] == ["<3>ValueError: why", "<3>the end"]


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_lines_are_plain_if_stderr_is_not_the_journal(tmp_path, kind):
    lines = written(tmp_path, kind, right=False)
    assert not [line for line in lines if line.startswith("<")]
    assert lines[1].startswith("agentd 2")
    assert lines[1].endswith(" INFO: i")
    assert lines[-1] == "agentd: the end"


def test_closed_descriptor_is_not_the_journal():
    read, write = os.pipe()
    stream = stream_of(read)
    assert reads(read, stream)
    os.close(read)
    os.close(write)
    assert not reads(read, stream)
    assert not reads(2, "")


def test_empty_message_gets_a_priority():
    assert marked("", 20) == "<6>"
