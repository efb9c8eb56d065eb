import pytest

from rlinf_actors.model.placement import merge_paths


def test_ours_first_then_the_nodes_no_duplicates_no_empty_entries():
    assert merge_paths({"PATH": ":/a:/c::/b"}, {"PATH": "/b:/a:"}) == {"PATH": "/b:/a:/c"}


def test_only_lists_of_directories_merge():
    node = {"PYTHONPATH": "/n", "MODEL_PATH": "/n", "LD_LIBRARY_PATH": "/n", "X": "n"}
    ours = {"PYTHONPATH": "/o", "MODEL_PATH": "/o", "PATH": "/o"}
    merged = merge_paths(node, ours)
    assert merged == {"PYTHONPATH": "/o:/n", "MODEL_PATH": "/o", "LD_LIBRARY_PATH": "/n", "X": "n", "PATH": "/o"}
    assert merge_paths(node, ours, "override")["PYTHONPATH"] == "/o"
    assert node["PYTHONPATH"] == "/n", "what was passed in stays"


def test_unknown_mode():
    with pytest.raises(ValueError, match="'prepend'; it must be 'append' or 'override'"):
        merge_paths({}, {}, "prepend")
