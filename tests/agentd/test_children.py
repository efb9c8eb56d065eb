import pytest
from children_kit import children, spec

pytestmark = pytest.mark.live


async def test_worker_comes_up_and_is_stopped(tmp_path):
    async with children(tmp_path) as (kids, reports):
        one = spec()
        kids.start([one])
        (ready,) = await reports.up(one)
        assert ready.port == 1000
        kids.stop([one.id], 5)
        exit = await reports.gone(one)
        assert (exit.kind, exit.signal) == ("stopped", 15)
