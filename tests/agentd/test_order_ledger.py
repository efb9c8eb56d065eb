"""The ledger of orders that an agentd writes for the next agentd."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agentd.run_dir import OrderLedger
from agentd.worker_process import running
from rlinf_actors.wire.agent_messages import StartWorkers
from rlinf_actors.wire.template_protocol import SurvivingWorker
from rlinf_actors.wire.values import WorkerSpec


def order(*ids: str) -> StartWorkers:
    return StartWorkers([WorkerSpec(id, "g", "ns", 0, 1, 0, {}) for id in ids], "d1", "m:C", "{}")


def files(tmp_path) -> int:
    return len(list(tmp_path.iterdir()))


def test_next_agentd_reads_orders_with_unacknowledged_workers(tmp_path):
    first = OrderLedger(tmp_path)
    first.write(order("a", "b"))
    first.write(order("c"))
    first.acknowledged(["c", "a"])
    assert files(tmp_path) == 1
    known = OrderLedger(tmp_path).read()
    assert sorted(known) == ["a", "b"]  # of one order: the inventory looks for both workers
    assert (known["b"].owner, known["b"].cls, known["b"].detail) == ("d1", "m:C", "{}")


def test_file_is_removed_with_the_orders_last_acknowledged_worker(tmp_path):
    OrderLedger(tmp_path).write(order("a", "b"))
    later = OrderLedger(tmp_path)
    later.read()
    later.acknowledged(["a"])
    assert files(tmp_path) == 1
    later.acknowledged(["b", "unknown"])
    assert files(tmp_path) == 0


def test_last_written_order_decides_a_workers_owner(tmp_path):
    ledger = OrderLedger(tmp_path)
    ledger.write(order("a", "b"))
    ledger.write(replace(order("a"), owner="", detached=True))
    known = OrderLedger(tmp_path).read()
    assert {id: (one.owner, one.detached) for id, one in known.items()} == {"a": ("", True), "b": ("d1", False)}
    ledger.acknowledged(["a", "b"])
    assert files(tmp_path) == 0


def test_close_removes_all_files_of_agentds_with_one_pid(tmp_path):
    OrderLedger(tmp_path).write(order("a"))
    second = OrderLedger(tmp_path)
    second.read()
    second.write(order("b"))
    assert files(tmp_path) == 2
    second.close()
    assert files(tmp_path) == 0


def test_malformed_file_is_logged_and_removed(tmp_path, caplog):
    (tmp_path / "1-1.start").write_bytes(b"\xc1 torn")
    assert OrderLedger(tmp_path).read() == {}
    assert "1-1.start cannot be read" in caplog.text
    assert files(tmp_path) == 0


def test_failed_write_records_no_order(tmp_path):
    ledger = OrderLedger(tmp_path / "gone")
    with pytest.raises(OSError, match="gone"):
        ledger.write(order("a"))
    assert ledger.read() == {}


def test_ledger_without_a_directory_writes_nothing():
    ledger = OrderLedger(None)
    ledger.write(order("a"))
    ledger.acknowledged(["a"])
    assert ledger.read() == {}


def test_unfinished_file_of_a_killed_agentd_is_removed(tmp_path):
    (tmp_path / "1-1.tmp").write_bytes(b"half")
    assert OrderLedger(tmp_path).read() == {}
    assert files(tmp_path) == 0


def test_token_of_a_job_is_in_no_file_and_comes_from_the_template(tmp_path):
    spec = WorkerSpec("w", "g", "ns", 0, 1, 0, {}, token="secret of the job")
    OrderLedger(tmp_path).write(StartWorkers([spec], "d1", "m:C", "{}"))
    [path] = tmp_path.iterdir()
    assert b"secret" not in path.read_bytes()
    known = OrderLedger(tmp_path).read()["w"]
    assert known.spec.token == ""
    found = running(known, SurvivingWorker("w", pid=7, token="secret of the job"))
    assert (found.pid, found.spec) == (7, spec)
