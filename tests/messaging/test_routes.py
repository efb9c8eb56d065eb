"""The table of paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from message_kit import World

from rlinf_actors import counters
from rlinf_actors.errors import ConfigError
from rlinf_actors.messaging import routes
from rlinf_actors.messaging.routes import ACCELERATOR, COLUMNS, CPU, MEANING, SMALL, TABLE, Pair, choose, lines
from rlinf_actors.settings import PATHS, Settings

EVERY_PAIR = [
    Pair(**dict(zip(COLUMNS, values, strict=True))) for values in itertools.product((False, True), repeat=len(COLUMNS))
]


@pytest.mark.parametrize(
    ("kind", "pair", "overrides", "path"),
    [
        (SMALL, Pair(), {}, "inline"),
        (SMALL, Pair(same_node=True, shared=True, ccl=True), {"cpu": "lane"}, "inline"),
        (CPU, Pair(same_node=True, shared=True), {}, "shared"),
        (CPU, Pair(same_node=True), {}, "pieces"),
        (CPU, Pair(ccl=True), {}, "pieces"),
        (CPU, Pair(ccl=True), {"cpu": "lane"}, "lane"),
        (CPU, Pair(same_node=True, shared=True, ccl=False), {"cpu": "lane"}, "shared"),
        (CPU, Pair(same_process=True, same_node=True, shared=True, ccl=True), {"cpu": "lane"}, "shared"),
        (ACCELERATOR, Pair(same_process=True, same_node=True, same_device=True, shared=True, ccl=True), {}, "local"),
        (ACCELERATOR, Pair(same_node=True, same_device=True, shared=True, ccl=True), {}, "ipc"),
        (ACCELERATOR, Pair(same_node=True, same_device=True, ccl=True), {}, "staged"),
        (ACCELERATOR, Pair(same_node=True, shared=True, ccl=True), {}, "lane"),
        (ACCELERATOR, Pair(ccl=True), {}, "lane"),
        (ACCELERATOR, Pair(), {}, "staged"),
        (ACCELERATOR, Pair(ccl=True), {"accelerator": "staged"}, "staged"),
        (ACCELERATOR, Pair(same_node=True, same_device=True, shared=True), {"accelerator": "staged"}, "staged"),
        (ACCELERATOR, Pair(same_node=True, same_device=True, shared=True, ccl=True), {"accelerator": "lane"}, "ipc"),
    ],
)
def test_the_first_row_that_fits_is_chosen(kind, pair, overrides, path):
    assert choose(kind, pair, overrides) == path


@pytest.mark.parametrize("overrides", [{}, {"cpu": "lane"}, {"accelerator": "lane"}, {"accelerator": "staged"}])
def test_every_pair_has_a_path_that_it_can_take(overrides):
    for kind in (SMALL, CPU, ACCELERATOR):
        for pair in EVERY_PAIR:
            path = choose(kind, pair, overrides)
            if path == "lane":
                assert (pair.ccl, pair.same_device, pair.same_process) == (True, False, False)
            if path in ("shared", "ipc"):
                assert pair.shared
                assert pair.same_node


def test_the_table_is_shown_with_overrides():
    assert all(row.path in MEANING for row in TABLE)
    plain = lines({})
    assert len(plain) == len(TABLE)
    assert plain[0][:1] + plain[0][-2:-1] == ("small", "inline")
    assert [row[-2] for row in lines({"cpu": "lane"}) if row[0] == "cpu"] == ["lane", "shared", "pieces"]
    assert "RLINF_ACTORS_PATHS" in lines({"accelerator": "staged"})[3][-1]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (None, {}),
        ("", {}),
        ("cpu=lane", {"cpu": "lane"}),
        (" accelerator = staged , cpu=lane,", {"accelerator": "staged", "cpu": "lane"}),
    ],
)
def test_the_paths_setting_is_parsed(text, paths):
    assert Settings.load({} if text is None else {PATHS: text}).paths == paths


@pytest.mark.parametrize("text", ["cpu", "cpu=ipc", "gpu=lane", "accelerator=", "cpu=lane;accelerator=staged"])
def test_a_wrong_setting_names_itself_and_what_is_right(text):
    with pytest.raises(ConfigError, match=r"RLINF_ACTORS_PATHS: has .*cpu=lane, accelerator=lane, accelerator=staged"):
        Settings.load({PATHS: text})


def test_a_setting_that_contradicts_itself_is_refused():
    with pytest.raises(ConfigError, match=r"accelerator=lane and for accelerator=staged"):
        Settings.load({PATHS: "accelerator=lane,accelerator=staged"})


H100 = routes.Ccl("2.21.5", "NVIDIA H100", "0000:1b:00.0")


@pytest.mark.parametrize(
    ("theirs", "same_node", "why"),
    [
        (routes.Ccl("2.21.5", "NVIDIA H100", "0000:2c:00.0"), True, ""),
        (routes.Ccl("2.21.5", "NVIDIA H100", "0000:1b:00.0"), False, ""),
        (routes.Ccl(), True, ""),
        (routes.Ccl("2.19.3", "NVIDIA H100", "0000:2c:00.0"), False, "versions differ: 2.21.5 and 2.19.3"),
        (routes.Ccl("2.21.5", "NVIDIA A100", "0000:2c:00.0"), False, "models differ"),
        (routes.Ccl("2.21.5", "NVIDIA H100", "0000:1b:00.0"), True, "parts of the GPU at 0000:1b:00.0"),
    ],
)
def test_a_ccl_that_cannot_connect_two_accelerators_is_known_before(theirs, same_node, why):
    assert why in routes.ccl_problem(H100, theirs, same_node)
    assert bool(routes.ccl_problem(theirs, H100, same_node)) == bool(why)


async def test_small_arrays_are_counted_as_inline():
    world = World()
    (a,), (_b,) = world.launch("a"), world.launch("b")
    before = counters.sent_by_path().get("inline", [0, 0])
    await a.send("b:0", [np.ones(1000), np.ones(10)])  # two buffers beside the pickled list
    messages, size = counters.sent_by_path()["inline"]
    assert messages == before[0] + 1
    assert 8080 < size - before[1] < 9080
