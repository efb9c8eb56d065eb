"""Placement strings: the grammar, its rules, and what the errors offer."""

# ruff: noqa: E501 (tables: a case a line)

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.errors import PlacementError
from rlinf_actors.placement.grammar import Part, Span, Target, assign, fewer, fits, more, parse


def render(written: tuple[Part, ...]) -> str:
    return ",".join(map(str, written))


G16 = Target("g", 16, "accelerator")


def flat(text: str, count: int = 16) -> list[list[int]]:
    return assign(text, Target("g", count, "accelerator"))


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("0", [[0]]),
        ("5", [[5]]),
        ("2-4", [[2], [3], [4]]),
        ("all", [[rank] for rank in range(16)]),
        (" ALL : 0-1 ", [list(range(8)), list(range(8, 16))]),
        ("0-3:0-1", [[0, 1], [2, 3]]),
        ("0-3:0", [[0, 1, 2, 3]]),
        ("0:0-2", [[0], [0], [0]]),
        ("0-1:0-3", [[0], [0], [1], [1]]),
        ("0-1:2-3,2-3:0-1", [[2], [3], [0], [1]]),
        ("0-1,3", [[0], [1], [3]]),
        ("0-1:0-3,4-5", [[0], [0], [1], [1], [4], [5]]),
        (" 0 - 1 : 0 - 1 , 3 ", [[0], [1], [3]]),
        ("0-1:0-3,3-5,7-10:7-14", [[0], [0], [1], [1], [3], [4], [5], [7], [7], [8], [8], [9], [9], [10], [10]]),
    ],
)
def test_each_string_gives_its_processes(text: str, held: list[list[int]]) -> None:
    assert flat(text) == held


def test_the_seed_example_is_fifteen_processes() -> None:
    assert len(flat("0-1:0-3,3-5,7-10:7-14")) == 15


BAD = [
    # the grammar
    ("", "the placement is empty"),
    ("   ", "the placement is empty"),
    ("0,", "has an empty part (a comma too many)"),
    (",0", "has an empty part"),
    ("0:", "cannot read '' as process ranks in part '0:'"),
    (":0", "cannot read '' as resource ranks in part ':0'"),
    ("0:1:2", "has 2 colons"),
    ("x", "cannot read 'x' as resource ranks"),
    ("0-1-2", "cannot read '0-1-2' as resource ranks"),
    ("-1", "cannot read '-1' as resource ranks"),
    ("0:x", "cannot read 'x' as process ranks"),
    ("0:all", "only resources can be 'all'"),
    ("٣", "cannot read '٣' as resource ranks"),
    ("1.0", "cannot read '1.0'"),
    ("9999999999", "cannot read '9999999999'"),
    ("3-0", "the resource ranks 3-0 in part '3-0' of placement '3-0' run backwards; write 0-3"),
    ("0-1:3-2", "the process ranks 3-2 in part '0-1:3-2' of placement '0-1:3-2' run backwards; write 2-3"),
    ("0:0-1000000", "asks for process 1000000; a placement has at most 1000000 processes"),
    # resources
    ("16", "names resource 16 of node group 'g', which has 16 resources (accelerators): ranks 0-15"),
    ("0-31", "to put 32 processes there, write `0-15:0-31`"),
    ("0-99999999", "ranks 0-15; its last rank is 15"),
    ("0-19", "on all of it, write `0-15:0-15` or `0-15:0-31`"),
    ("0-1,16", "names resource 16 of node group 'g', which has 16 resources (accelerators): ranks 0-15; its last rank is 15"),
    ("4-7,0-3", "names resource 0 after 7: resource ranks ascend from part to part; write `0-3:4-7,4-7:0-3`"),
    ("0-3,2-5", "names a resource twice (part '2-5' after '0-3')"),
    ("0,0", "for two processes on one resource write them in one part, `0:0-1`"),
    ("all,3", "names a resource twice"),
    # lengths
    ("0-1:0-200", "puts 201 processes on 2 resources; one of the two numbers must divide the other; write `0-1:0-199` or `0-1:0-201`"),
    ("0-1:0-200,2-3:201-511", "part '0-1:0-200' of placement '0-1:0-200,2-3:201-511' puts 201 processes on 2 resources; one of the two numbers must divide the other; write `0-1:0-199,2-3:200-509` or `0-1:0-201,2-3:202-513`"),
    ("0-1,2-4:2-5", "write `0-1:0-1,2-4:2-4` or `0-1:0-1,2-4:2-7`"),
    ("0-3:0-2", "write `0-3:0-1` or `0-3:0-3`"),
    ("0-4:0-1", "write `0-4:0` or `0-4:0-4`"),
    # processes
    ("0-1:1-2", "has no process 0: process ranks are contiguous from 0, each once; write `0-1:0-1`"),
    ("0-1:0-3,2-3:5-8", "has no process 4: process ranks are contiguous from 0, each once; write `0-1:0-3,2-3:4-7`"),
    ("0-1:0-1,2-3:1-2", "has process 1 twice: process ranks are contiguous from 0, each once; write `0-1:0-1,2-3:2-3`"),
    # a comma is not a union
    ("0-1,4-5:0-3", "gives process 0 twice: a comma starts a new part, so '0-1,4-5' is not one part with processes 0-3; give each range its own processes: `0-1:0-1,4-5:2-3`"),
    ("0-1,4-5:0-4", "`0-1:0-1,4-5:2-3` or `0-1:0-3,4-5:4-7`"),
    ("0-1,4-5:0-1", "`0-1:0,4-5:1`"),
    ("0,2,4:0-5", "`0:0-1,2:2-3,4:4-5`"),
    ("0:0,2-3,5-6:1-4", "'2-3,5-6' is not one part with processes 1-4; give each range its own processes: `2-3:1-2,5-6:3-4`"),
    ("0,2:0", "a process on resources of two ranges needs FlexiblePlacementStrategy([[0, 2]])"),
    ("0-2,4:0-1", "needs FlexiblePlacementStrategy([[0, 1], [2, 4]])"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_each_fault_offers_a_correction(text: str, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        assign(text, G16)
    assert message in str(caught.value)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        (
            Target("a800", 1, "node"),
            "0-3",
            "has one resource (the node): rank 0; to put 4 processes there, write `0:0-3`",
        ),
        (Target("a800", 1, "node"), "1:0-7", "to put 8 processes there, write `0:0-7`"),
        (Target("f", 1, "Franka"), "0-1", "has one resource (one Franka): rank 0; to put 2 processes"),
        (Target("f", 0, "Franka"), "all", "asks for all resources of node group 'f', which has no Franka"),
        (Target("f", 0, "Franka"), "0", "names resource 0 of node group 'f', which has no Franka"),
    ],
)
def test_a_fault_says_which_resources_the_group_has(target: Target, text: str, message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        assign(text, target)
    assert message in str(caught.value)


def test_a_ready_number_may_have_been_sexagesimal() -> None:
    with pytest.raises(PlacementError, match='if 1:30 was meant, YAML read it in base 60: quote it, "1:30"'):
        assign("90", G16, maybe_sexagesimal=True)
    assert assign("60", Target("g", 61, "node"), maybe_sexagesimal=True) == [[60]]


spans = st.builds(Span.of, st.integers(0, 50), st.integers(1, 30))
parts = st.lists(st.builds(Part, st.none() | spans, st.none() | spans), min_size=1, max_size=5).map(tuple)


@given(parts)
def test_render_and_parse_are_inverse(written: tuple[Part, ...]) -> None:
    assert parse(render(written)) == written


@given(st.text(max_size=20) | st.text("0123456789-:, al", max_size=20) | parts.map(render), st.integers(0, 60))
def test_any_text_gives_a_placement_or_placement_error(text: str, count: int) -> None:
    try:
        held = flat(text, count)
    except PlacementError as error:
        _check_advice(str(error), count)
        return
    used = [rank for ranks in held for rank in ranks]
    assert all(ranks == list(range(ranks[0], ranks[0] + len(ranks))) for ranks in held)
    assert set(used) <= set(range(count))
    # A resource is either shared by processes that hold nothing else, or belongs to one process.
    for ranks in held:
        if len(ranks) > 1:
            assert all(used.count(rank) == 1 for rank in ranks)


def _check_advice(message: str, count: int) -> None:
    """What an error tells people to write is right."""
    if "must divide" in message or "contiguous" in message or "processes there, write" in message:
        for string in re.findall("`(.*?)`", message.split("; ")[-1]):
            assert flat(string, count)


@given(st.integers(1, 60), st.integers(1, 300))
def test_suggested_counts_are_the_nearest_that_fit(resources: int, processes: int) -> None:
    if fits(resources, processes):
        return
    low, high = fewer(resources, processes), more(resources, processes)
    assert low < processes < high
    assert fits(resources, low)
    assert fits(resources, high)
    assert not any(fits(resources, between) for between in range(low + 1, high) if between != processes)
