"""Templates that are ordered before agentd's workers exist."""

import os

from workers_kit import children, order, spec

from agentd.config_fields import Config
from agentd.template_start import order_first
from rlinf_actors import procfs


async def test_first_worker_is_forked_by_the_template_that_was_ordered_first(tmp_path):
    async with children(tmp_path, first=True) as (kids, reports):
        (first,) = kids._templates.running
        one = spec()
        kids.start(order([one]))
        (ready,) = await reports.up(one)
        assert ready.pid in procfs.children(first.pid)
        assert kids._templates.running == {first}


async def test_worker_with_another_environment_gets_a_template_of_its_own(tmp_path):
    async with children(tmp_path, first=True) as (kids, reports):
        (first,) = kids._templates.running
        one = spec(env={"OMP_NUM_THREADS": "3"})
        kids.start(order([one]))
        (ready,) = await reports.up(one)
        assert ready.pid not in procfs.children(first.pid)


async def test_aborted_template_leaves_no_process_and_no_file(tmp_path):
    before = procfs.children(os.getpid())
    config = Config(embedded=True, head=True, prestart=())
    starter, ordered = order_first(config, str(tmp_path), dict(os.environ))
    assert set(procfs.children(os.getpid())) - set(before), "a keeper was started"
    await starter.abort(ordered)
    assert set(procfs.children(os.getpid())) <= set(before)
    assert os.listdir(tmp_path / "t") == []


async def test_template_is_left_to_the_first_launch_without_a_keeper(tmp_path, caplog):
    (tmp_path / "keeper").mkdir()  # no socket can be bound there
    config = Config(embedded=True, head=True, prestart=())
    assert order_first(config, str(tmp_path), dict(os.environ)) is None
    assert "no template was started ahead of need" in caplog.text
