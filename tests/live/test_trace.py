"""The trace of a job: one Chrome trace with all its processes, also a killed one, and arrows between them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from trace_workers import Consumer, Producer

from rlinf_actors import Channel, Cluster, ConfigError, NodePlacementStrategy, Tracer, WorkerDiedError
from rlinf_actors.tracing import recorder
from tests.tracing.chrome import check

pytestmark = pytest.mark.live


def load(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(path.read_text())
    check(trace["traceEvents"])
    return trace


def spans(trace: dict[str, Any]) -> Counter[tuple[str, str]]:
    """How often each (process, name of a span) occurs."""
    names = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    return Counter((names[one["pid"]], one["name"]) for one in trace["traceEvents"] if one["ph"] == "X")


def arrows(trace: dict[str, Any]) -> set[tuple[str, str]]:
    """The processes that arrows connect."""
    names = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    starts = {one["id"]: names[one["pid"]] for one in trace["traceEvents"] if one["ph"] == "s"}
    return {(starts[one["id"]], names[one["pid"]]) for one in trace["traceEvents"] if one["ph"] == "f"}


async def awaited(cluster: Cluster, path: Path) -> str:
    return await cluster.collect_trace(path, async_op=True)


def test_trace_has_calls_messages_items_and_a_killed_worker(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "trace_events.jsonl"
    with Cluster(cluster_cfg={"num_nodes": 1, "tracer": {"enable": True, "output_file": str(path)}}) as cluster:
        producer = Producer.create_group().launch(cluster, NodePlacementStrategy([0]), name="producer")
        consumer = Consumer.create_group().launch(cluster, NodePlacementStrategy([0]), name="consumer")
        with Tracer.trace_span("step", args={"step_idx": 1}):
            taken = consumer.take()
            assert producer.work().wait() == ["sent"]
            assert taken.wait() == [{"x": 1}]
            channel: Channel[int] = Channel.create("items")
            fed, eaten = producer.feed(channel, 3), consumer.eat(channel, 3)
            assert eaten.wait() == [[0, 1, 2]]
            fed.wait()
        early = load(Path(asyncio.run(awaited(cluster, tmp_path / "early.json"))))
        with pytest.raises(WorkerDiedError):
            producer.die().wait()
    assert recorder.active is None
    found = spans(early)
    assert found["driver", "step"] == found["driver", "producer.work()"] == found["producer:0", "work"] == 1
    assert found["producer:0", "put into channel 'items'"] == found["consumer:0", "get from channel 'items'"] == 3
    assert found["producer:0", "send to consumer:0"] == found["consumer:0", "recv from producer:0"] == 1
    assert ("producer:0", "hidden") not in found
    assert arrows(early) >= {
        ("driver", "producer:0"), ("driver", "consumer:0"), ("producer:0", "consumer:0"),
        ("producer:0", "channel@items:0"), ("channel@items:0", "consumer:0"),
    }  # fmt: skip
    whole = load(path.with_suffix(".json"))
    assert spans(whole)["producer:0", "last words"] == 1
    (killed,) = [one for one in whole["traceEvents"] if one["name"] == "last words"]
    assert killed["args"] == {"unfinished": True}
    assert whole["otherData"]["missing"] == []
    assert [json.loads(line) for line in path.read_text().splitlines()] == whole["traceEvents"]


def test_script_that_ends_without_shutdown_writes_its_trace(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from rlinf_actors import Cluster, Tracer\n"
        "cluster = Cluster(cluster_cfg={'num_nodes': 1, 'tracer': {'enable': True, 'output_file': 'trace.json'}})\n"
        "with Tracer.trace_span('step'): pass\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr
    assert spans(load(tmp_path / "trace.json"))["driver", "step"] == 1


def test_file_that_cannot_be_written_fails_the_start_and_leaves_nothing() -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"cluster.tracer.output_file: /proc/no cannot be used"):
        Cluster(cluster_cfg={"num_nodes": 1, "tracer": {"enable": True, "output_file": "/proc/no/trace.json"}})
    assert recorder.active is None
    assert not set(threading.enumerate()) - threads


def test_job_that_is_not_traced_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Cluster(cluster_cfg={"num_nodes": 1, "tracer": {"enable": False}}):
        assert recorder.active is None
    assert list(tmp_path.iterdir()) == []
