"""The plots: which points they have, and that equal data give equal files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots

ROWS = [
    {"case": "one_call", "name": "await", "ours": 100, "raw": 80, "prototype": 90, "ray": None},
    {"case": "fan_out", "name": "await_8", "ours": 500, "raw": 80, "prototype": 400, "ray": None},
    {"case": "fan_out", "name": "zmq_8", "ours": None, "raw": 300, "prototype": None, "ray": None},
    {"case": "transfers", "name": "object_64", "ours": 10.0, "raw": 20.0, "prototype": None, "ray": 0.5},
]
SIZES = [
    {"agents": 10, "figures": {"join": {"all_s": 0.1}, "driver": {"error": "failed"}}},
    {"agents": 100, "figures": {"join": {"all_s": 0.5}}},
]


def test_raw_fan_out_is_that_to_as_many_processes() -> None:
    assert plots.ranks({"rows": ROWS}) == {
        "this project": [(1, 100), (8, 500)], "raw": [(1, 80), (8, 300)], "prototype": [(1, 90), (8, 400)],
    }  # fmt: skip


def test_what_was_not_measured_has_no_point() -> None:
    assert plots.sizes({"rows": ROWS}) == {
        "this project: send, recv": [(64, 10.0)], "raw: one copy": [(64, 20.0)], "Ray: send, recv": [(64, 0.5)],
    }  # fmt: skip
    assert plots.nodes({"sizes": SIZES}) == {"all agents join": [(10, 0.1), (100, 0.5)]}


def test_equal_data_give_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        written = plots.draw(folder, {"rows": ROWS}, {"sizes": SIZES})
        assert [path.name for path in written] == ["ranks.svg", "sizes.svg", "nodes.svg"]
    for path in written:
        assert (first / path.name).read_bytes() == path.read_bytes()
