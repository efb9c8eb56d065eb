import pytest

from rlinf_actors import UsageError
from rlinf_actors.group.group_spec import WorkerLimits


@pytest.mark.parametrize(
    ("given", "size"),
    [("8GiB", 8 << 30), ("1.5 GiB", 3 << 29), (" 500MB ", 500_000_000), (1 << 30, 1 << 30), (None, None)],
)
def test_memory_limits_are_read(given, size):
    assert WorkerLimits.of(given, None, "required") == WorkerLimits(size)


@pytest.mark.parametrize("given", ["8", "8G", "GiB", "-8GiB", "", True, 1.5, "8 gib", 8, "1MiB"])
def test_invalid_memory_limits_are_refused(given):
    with pytest.raises(UsageError, match=r"memory_limit is .*(such as '8GiB'|less than 64 MiB)"):
        WorkerLimits.of(given, None, "required")


@pytest.mark.parametrize("given", [0, 15, -1, True, "64", 20.0])
def test_invalid_process_limits_are_refused(given):
    with pytest.raises(UsageError, match="pids_limit"):
        WorkerLimits.of(None, given, "required")


def test_limit_policies_are_checked():
    assert WorkerLimits.of(None, 100, "best_effort") == WorkerLimits(None, 100, True)
    with pytest.raises(UsageError, match="required, best_effort"):
        WorkerLimits.of(None, None, "maybe")
