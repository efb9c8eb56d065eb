"""What an agentd writes down for the next one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agentd.run_dir import OrderLedger
from rlinf_actors.wire.agent_messages import StartWorkers
from rlinf_actors.wire.values import WorkerSpec


def order(*ids: str) -> StartWorkers:
    return StartWorkers([WorkerSpec(id, "g", "ns", 0, 1, 0, {}) for id in ids], "d1", "m:C", "{}")


def files(tmp_path) -> int:
    return len(list(tmp_path.iterdir()))


def test_the_next_agentd_reads_what_is_not_acknowledged(tmp_path):
    first = OrderLedger(tmp_path)
    first.write(order("a", "b"))
    first.write(order("c"))
    first.acknowledged(["c", "a"])
    assert files(tmp_path) == 1
    known = OrderLedger(tmp_path).read()
    assert sorted(known) == ["a", "b"]  # of one order: who takes stock looks for both
    assert (known["b"].owner, known["b"].cls, known["b"].detail) == ("d1", "m:C", "{}")


def test_the_last_acknowledged_worker_of_an_order_takes_its_file_along(tmp_path):
    OrderLedger(tmp_path).write(order("a", "b"))
    later = OrderLedger(tmp_path)
    later.read()
    later.acknowledged(["a"])
    assert files(tmp_path) == 1
    later.acknowledged(["b", "unknown"])
    assert files(tmp_path) == 0


def test_who_owns_a_worker_that_runs_is_what_was_written_last(tmp_path):
    ledger = OrderLedger(tmp_path)
    ledger.write(order("a", "b"))
    ledger.write(replace(order("a"), owner="", detached=True))
    known = OrderLedger(tmp_path).read()
    assert {id: (one.owner, one.detached) for id, one in known.items()} == {"a": ("", True), "b": ("d1", False)}
    ledger.acknowledged(["a", "b"])
    assert files(tmp_path) == 0


def test_a_stop_leaves_no_file_and_two_agentds_of_one_pid_no_mix_up(tmp_path):
    OrderLedger(tmp_path).write(order("a"))
    second = OrderLedger(tmp_path)
    second.read()
    second.write(order("b"))
    assert files(tmp_path) == 2
    second.close()
    assert files(tmp_path) == 0


def test_a_file_that_is_no_order_is_named_and_removed(tmp_path, caplog):
    (tmp_path / "1-1.start").write_bytes(b"\xc1 torn")
    assert OrderLedger(tmp_path).read() == {}
    assert "1-1.start cannot be read" in caplog.text
    assert files(tmp_path) == 0


def test_what_cannot_be_written_is_refused_whole(tmp_path):
    ledger = OrderLedger(tmp_path / "gone")
    with pytest.raises(OSError, match="gone"):
        ledger.write(order("a"))
    assert ledger.read() == {}


def test_without_a_directory_nothing_is_written():
    ledger = OrderLedger(None)
    ledger.write(order("a"))
    ledger.acknowledged(["a"])
    assert ledger.read() == {}


def test_what_was_being_written_when_agentd_was_killed_is_removed(tmp_path):
    (tmp_path / "1-1.tmp").write_bytes(b"half")
    assert OrderLedger(tmp_path).read() == {}
    assert files(tmp_path) == 0
