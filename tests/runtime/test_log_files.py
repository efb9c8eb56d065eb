"""Log files of workers in the driver: paths, contents, credit, and a disk that is full."""

from __future__ import annotations

import errno
import os
import threading

import pace
import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.runtime import log_files
from rlinf_actors.runtime.log_files import LogFiles, log_path
from rlinf_actors.wire.agent_messages import CUT, UPDATE, LogCredit, LogLines

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("worker", "path"),
    [
        ("env:0", "env/rank_0.log"),
        ("my group/x:12", "my_group_x/rank_12.log"),
        ("..:1", "__/rank_1.log"),
        ("策略:3", "__/rank_3.log"),
    ],
)
def test_each_rank_has_a_file_in_the_directory_of_its_group(worker, path):
    assert log_path("/logs", worker) == f"/logs/{path}"


class Kit:
    def __init__(self, directory):
        self.directory = directory
        self.shown, self.credits = [], []
        self.files = LogFiles(str(directory), self.shown.append, self.credits.append)

    def write(self, *entries):
        lines = LogLines("ns", "n0", [("env:0", stream, text) for stream, text in entries])
        self.files.write(lines)
        return lines

    def settled(self):
        reached = threading.Event()
        self.files.after(reached.set)
        assert reached.wait(pace.PATIENCE_S)

    def text(self):
        return (self.directory / "env" / "rank_0.log").read_text()


@pytest.fixture
def kit(tmp_path):
    kit = Kit(tmp_path)
    yield kit
    kit.files.give_up()
    kit.files.close()


def test_lines_are_appended_without_prefix_and_then_printed(kit):
    (kit.directory / "env").mkdir()
    (kit.directory / "env" / "rank_0.log").write_text("an earlier run\n")
    one, two = kit.write(("out", "one"), ("err", "oops")), kit.write(("out", "two"))
    kit.settled()
    assert kit.text() == "an earlier run\none\noops\ntwo\n"
    assert kit.shown == [one, two]
    assert kit.credits == [LogCredit("ns", "n0", one.cost), LogCredit("ns", "n0", two.cost)]


def test_pieces_of_a_long_line_are_one_line_in_the_file(kit):
    kit.write(("out", "a" * 10 + CUT), ("err", "between"), ("out", "b" * 10 + CUT))
    kit.write(("out", "end"), ("out", "the worker ended in this" + CUT))
    kit.files.close()
    assert kit.text() == "between\n" + "a" * 10 + "b" * 10 + "end\nthe worker ended in this\n"


def test_last_state_of_a_progress_bar_is_kept(kit):
    kit.write(("err", f" 10%{UPDATE}"), ("out", "between"), ("err", f" 20%{UPDATE}"))
    kit.write(("err", "100%"), ("err", f" 1/9{UPDATE}"))
    kit.files.close()
    assert kit.text() == "between\n100%\n 1/9\n"


def test_terminal_that_stands_still_withholds_credit_until_the_end(kit, monkeypatch):
    monkeypatch.setattr(log_files, "AHEAD", 100)
    first, second = kit.write(("out", "x" * 40)), kit.write(("out", "y" * 400))
    kit.settled()
    assert kit.text().endswith("y\n"), "the file does not wait for the terminal"
    assert len(kit.credits) == 1
    kit.files.printed(LogCredit("ns", "n0", first.cost))
    assert len(kit.credits) == 1
    kit.files.printed(LogCredit("ns", "n0", second.cost))
    assert len(kit.credits) == 2
    kit.write(("out", "z" * 400))
    kit.settled()
    assert len(kit.credits) == 2
    kit.files.hurry()
    assert len(kit.credits) == 3


def test_full_disk_holds_the_credit_and_loses_nothing(kit, monkeypatch, caplog):
    monkeypatch.setattr(log_files, "AGAIN_S", 0.01)
    write, begun, failed, room = os.write, threading.Event(), threading.Event(), threading.Event()

    def full(file, data):
        if room.is_set() or len(data) == 1:
            return write(file, data)
        if begun.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        begun.set()
        return write(file, data[:3])

    monkeypatch.setattr(os, "write", full)
    kit.write(("out", "one"), ("out", "two"))
    assert failed.wait(pace.PATIENCE_S)
    assert kit.credits == []
    room.set()
    kit.settled()
    assert kit.text() == "one\ntwo\n"
    assert len(kit.credits) == 1
    assert "nothing was left out" in caplog.text


def test_lines_that_cannot_be_written_until_the_end_are_counted(kit):
    (kit.directory / "env").write_text("a file in the place of the directory")
    kit.write(("out", "one"), ("out", "two"))
    kit.files.give_up()
    kit.settled()
    assert kit.files.unwritten == 2
    assert len(kit.credits) == 1


def test_directory_that_cannot_be_made_is_refused_with_the_user_who_writes(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"distributed_log_dir: .*cannot be used.* this driver writes .* as user"):
        log_files.prepare(str(tmp_path / "file" / "logs"))
