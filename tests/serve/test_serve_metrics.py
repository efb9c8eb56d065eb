"""Metrics: right figures, counters that never fall, and no name in dashboard or alerts that is not exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from board_kit import board, figures, status
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from rlinf_actors.sampling.sample import MOST_METHODS, Board, Sample, quantile
from rlinf_actors.serve import metrics
from rlinf_actors.wire.client_messages import Status
from rlinf_actors.wire.figure_values import MethodFigures, NodeFigures, WorkerFigures

FILES = Path(metrics.__file__).parent / "files"


def samples(found: Board) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the labels and values of each exported sample, by its name."""
    rows: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.text(found).decode()):
        for sample in family.samples:
            rows.setdefault(sample.name, []).append((sample.labels, sample.value))
    return rows


def value(rows, name: str, **labels: str) -> float:
    (found,) = [value for given, value in rows[name] if labels.items() <= given.items()]
    return found


def test_figures_are_exported_by_node_worker_method_and_channel():
    rows = samples(board())
    assert value(rows, "rlinf_actors_up") == 1
    assert value(rows, "rlinf_actors_nodes", state="suspect") == 1
    assert value(rows, "rlinf_actors_node_up", node="gpu-1") == 0
    assert value(rows, "rlinf_actors_worker_resident_bytes", group="rollout", rank="1") == 1 << 30
    assert value(rows, "rlinf_actors_worker_sent_bytes_total", rank="0", group="rollout", path="shared") == 30 << 20
    assert value(rows, "rlinf_actors_worker_unresponsive", rank="0", group="rollout") == 1
    assert value(rows, "rlinf_actors_worker_restarts_total", rank="0", group="rollout") == 1
    assert value(rows, "rlinf_actors_calls_total", method="step", outcome="returned") == 60
    assert value(rows, "rlinf_actors_call_duration_seconds_bucket", method="step", le="0.003") == 60
    assert value(rows, "rlinf_actors_call_duration_seconds_bucket", method="step", le="0.001") == 0
    assert value(rows, "rlinf_actors_channel_items", channel="samples") == 30
    assert value(rows, "rlinf_actors_accelerator_utilization_ratio", node="gpu-0", index="0") == 0.5
    assert value(rows, "rlinf_actors_robot_lease", robot="Franka 10.0.0.9") == 1
    assert value(rows, "rlinf_actors_events_total", kind="worker_died") == 1


def test_nodes_of_one_host_name_are_told_apart_by_their_ranks():
    found, known = Board(), status()
    nodes = [replace(node, report=replace(node.report, hostname="lab")) for node in known.nodes]
    found.take(Sample(100.0, 100.0, replace(known, nodes=nodes), figures(100.0, 10)))
    rows = samples(found)
    for name, series in rows.items():
        keys = [tuple(sorted(labels.items())) for labels, _ in series]
        assert len(keys) == len(set(keys)), name
    assert value(rows, "rlinf_actors_node_up", node="lab (rank 0)") == 1
    assert {worker.place for worker in found.workers} == {"lab (rank 0)", "lab (rank 1)"}
    assert {labels["node"] for labels, _ in rows["rlinf_actors_worker_restarts_total"]} <= {
        labels["node"] for labels, _ in rows["rlinf_actors_node_up"]
    }


def test_every_metric_of_dashboard_and_alerts_is_exported():
    found = set(samples(board()))
    texts = {name: FILES.joinpath(name).read_text() for name in ("grafana-dashboard.json", "alerts.yml")}
    for name, text in texts.items():
        named = set(re.findall(r"\brlinf_actors_[a-z0-9_]+", text))
        assert named, name
        assert named <= found, (name, named - found)
    rules = yaml.safe_load(texts["alerts.yml"])["groups"][0]["rules"]
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in rules)
    panels = json.loads(texts["grafana-dashboard.json"])["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def take(found: Board, at: float, *workers: WorkerFigures) -> None:
    found.take(Sample(at, at, status(), {"id-0": NodeFigures(list(workers), cpus=4, cpu_s=at)}, {}))


def total(found: Board, method: str = "step") -> int:
    return found.methods["job-a", "rollout"][method].done


def of(id: str, done: int, *more: MethodFigures) -> WorkerFigures:
    return WorkerFigures(id, calls=[MethodFigures("step", done, 0, done * 0.1, [0] * 6 + [done] + [0] * 8), *more])


def test_counts_of_a_group_never_fall_when_workers_restart_end_or_are_silent():
    found = Board()
    take(found, 0.0, of("w-0", 100), of("w-1", 10))
    assert total(found) == 110
    take(found, 5.0, of("w-0", 5), of("w-1", 20))  # w-0 counts anew
    assert total(found) == 125
    take(found, 10.0, WorkerFigures("w-0", fault="silent"))
    take(found, 15.0, of("w-0", 8), of("w-1", 21))
    assert total(found) == 129


def test_methods_beyond_the_bound_count_together():
    found = Board()
    take(found, 0.0, of("w-0", 1, *(MethodFigures(f"m{number}", 2) for number in range(60))))
    methods = found.methods["job-a", "rollout"]
    assert len(methods) == MOST_METHODS
    assert sum(method.done for method in methods.values()) == 121


def test_nothing_is_kept_of_what_has_gone():
    found = board()
    found.take(Sample(1.0, 200.0, Status("e", "1", 1.0, [], [], []), {}, {}))
    found.take(Sample(1.0, 205.0, Status("e", "1", 1.0, [], [], []), {}, {}))
    assert (found.nodes, found.workers, found.channels, found.methods, found.node_history) == ([], [], [], {}, {})
    assert not found._rates._last
    assert not found._calls


def test_rates_are_those_between_two_rounds():
    found = board()
    worker = found.worker("w-1")
    assert worker.calls == 2.0  # 10 in 5 s
    assert worker.cpu == 0.5
    assert found.node("id-0").cpu == 0.5
    assert found.channels[0].entered_rate == 2.0
    assert list(found.channels[0].depths) == [10, 20, 30]
    assert quantile(figures(1.0, 10)["id-1"].workers[0].calls[0].buckets, 0.99) == 0.003
