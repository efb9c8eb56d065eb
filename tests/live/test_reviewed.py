"""Regressions of the core, each as a user meets them."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import reviewed_workers as rw

from rlinf_actors import NameInUseError, UsageError, WorkerError, WorkerGroup

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("module_leak_check")]


@pytest.fixture
def hands(cluster):
    return rw.Hands.create_group().launch(cluster, name="hands")


def test_caller_may_change_arguments_after_a_call(hands):
    array = np.ones(500_000)
    total = hands.total(array)
    array[:] = 0
    assert total.wait() == [500_000.0]


def test_worker_may_change_a_returned_object(hands):
    kept = hands.kept()
    hands.wipe().wait()
    assert kept.wait()[0].sum() == 500_000.0


def test_error_whose_text_is_not_utf8_reaches_the_caller(hands):
    with pytest.raises(FileNotFoundError) as caught:
        hands.odd_file_name().wait()
    assert isinstance(caught.value, WorkerError)
    assert hands.total(np.ones(1)).wait() == [1.0]


def test_an_error_with_a_property_that_raises_reaches_the_caller(hands):
    with pytest.raises(rw.OddError):
        hands.odd_error().wait()


def test_name_is_free_after_its_launch_failed(cluster):
    for _ in range(3):
        with pytest.raises(WorkerError) as caught:
            rw.Hands.create_group(odd=True).launch(cluster, name="again").wait_ready()
        assert not isinstance(caught.value, NameInUseError)


def test_several_threads_read_one_result(hands):
    result = hands.kept()
    read = []
    threads = [threading.Thread(target=lambda: read.append(result.wait()[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [array.sum() for array in read] == [500_000.0] * 4


def test_handles_found_at_the_same_time_are_one_object(hands):
    hands.wait_ready()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(WorkerGroup.from_group_name(rw.Hands, "hands"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(handle.control.group) for handle in found}) == 1


def test_coroutine_worker_that_waits_for_itself_gets_an_error(cluster):
    group = rw.Notes.create_group().launch(cluster, name="notes")
    with pytest.raises(UsageError, match="never end"):
        group.waits_for_itself().wait()


def test_calls_of_a_coroutine_worker_start_in_order(cluster):
    group = rw.Notes.create_group().launch(cluster, name="notes")
    group.wait_ready()
    group.note_async("first")
    group.note("second")
    assert group.noted().wait() == [["first", "second"]]


def test_forked_child_of_a_driver_gets_an_error_that_it_has_no_connections(hands):
    hands.wait_ready()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hands.total(np.ones(1)).wait()
        except UsageError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        assert b"fork" in pipe.read()
    assert hands.total(np.ones(1)).wait() == [1.0]


def test_a_stream_has_no_deadline(cluster):
    group = rw.Notes.create_group().launch(cluster, name="notes")
    with pytest.raises(UsageError, match="deadline"):
        group.with_timeout(1.0).stream(3)
