import pytest

from rlinf_actors.model.placement import merge_paths


def test_merged_path_has_workers_entries_first_and_no_duplicates():
    assert merge_paths({"PATH": ":/a:/c::/b"}, {"PATH": "/b:/a:"}) == {"PATH": "/b:/a:/c"}


def test_only_known_path_variables_are_merged():
    node = {"PYTHONPATH": "/n", "MODEL_PATH": "/n", "LD_LIBRARY_PATH": "/n", "X": "n"}
    ours = {"PYTHONPATH": "/o", "MODEL_PATH": "/o", "PATH": "/o"}
    merged = merge_paths(node, ours)
    assert merged == {"PYTHONPATH": "/o:/n", "MODEL_PATH": "/o", "LD_LIBRARY_PATH": "/n", "X": "n", "PATH": "/o"}
    assert merge_paths(node, ours, "override")["PYTHONPATH"] == "/o"
    assert node["PYTHONPATH"] == "/n", "the argument is unchanged"


def test_unknown_merge_mode_raises_value_error():
    with pytest.raises(ValueError, match="'prepend'; it must be 'append' or 'override'"):
        merge_paths({}, {}, "prepend")
