"""Environment variables: what each fault says, and which values stand for nothing."""

from __future__ import annotations

import pytest

from rlinf_actors import settings
from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import CodeSettings, Settings, Unit


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (settings.NODE_RANK, "-1", "is '-1'; it must be a whole number from 0 up"),
        (settings.NODE_RANK, "one", "is 'one'; it must be a whole number from 0 up"),
        (settings.PATH_ENV_MERGE_MODE, "prepend", "is 'prepend'; it must be one of append, override"),
        (settings.TIMEOUT_MINUTES, "0", "is '0'; it must be a number of minutes above 0"),
        (settings.TIMEOUT_MINUTES, "nan", "is 'nan'; it must be a number of minutes above 0"),
        (settings.TIMEOUT_MINUTES, "inf", "is 'inf'; it must be a number of minutes above 0"),
        (settings.SEND_WINDOW, "1024", "is '1024'; it must be a number of bytes from 1048576 up"),
        (settings.CHANNEL_BYTES, "8G", "is '8G'; it must be a number of bytes from 0 up"),
        (settings.ROBOT_OWNER_MUST_ANSWER, "yes", "is 'yes'; it must be 1 (yes) or 0 (no)"),
        (settings.LOST_ERRORS, "fail", "is 'fail'; it must be end, exit-code or log"),
        (settings.PATHS, "cpu=staged", "has 'cpu=staged'; it must be a list, separated by commas, of: cpu=lane"),
    ],
)
def test_a_wrong_value_names_its_variable_and_what_is_expected(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load({variable: value})
    assert str(caught.value).startswith(f"{variable}: {message}")
    assert caught.value.path == variable


def test_empty_variables_are_not_set() -> None:
    names = (settings.NODE_RANK, settings.TIMEOUT_MINUTES, settings.SEND_WINDOW, settings.HEAD)
    assert Settings.load(dict.fromkeys(names, "")) == Settings.load({})


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", None)])
def test_robot_owner_must_answer(value: str, expected: bool | None) -> None:
    assert Settings.load({settings.ROBOT_OWNER_MUST_ANSWER: value}).robot_owner_must_answer is expected


@pytest.mark.parametrize(
    ("environ", "fail", "end"),
    [
        ({}, True, False),
        ({settings.LOST_ERRORS: "log"}, False, False),
        ({settings.LOST_ERRORS: "end"}, True, True),
        ({settings.DROPIN: "1"}, True, True),
        ({settings.DROPIN: "1", settings.LOST_ERRORS: "exit-code"}, True, False),
    ],
)
def test_programs_of_rlinf_end_by_errors_that_are_not_awaited(environ: dict[str, str], fail: bool, end: bool) -> None:
    loaded = Settings.load(environ)
    assert (loaded.fail_on_lost_errors, loaded.end_on_lost_errors) == (fail, end)


def test_numbers_are_read() -> None:
    loaded = Settings.load({settings.NODE_RANK: "3", settings.TIMEOUT_MINUTES: "1.5", settings.SHARED_MEMORY: "0"})
    assert (loaded.node_rank, loaded.timeout_minutes, loaded.shared_memory_bytes) == (3, 1.5, 0)


def test_a_watchdog_of_another_process_is_not_ours() -> None:
    assert Unit.load({"WATCHDOG_USEC": "2000000"}, pid=7).watchdog_s == 2.0
    assert Unit.load({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "7"}, pid=7).watchdog_s == 2.0
    assert Unit.load({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "8"}, pid=7).watchdog_s is None
    with pytest.raises(ConfigError, match="WATCHDOG_USEC: is '0'; it must be a number of microseconds above 0"):
        Unit.load({"WATCHDOG_USEC": "0"}, pid=7)


def test_code_settings_are_the_defaults_where_no_variable_is_set():
    assert CodeSettings.load({}) == CodeSettings()
    assert CodeSettings.load({"RLINF_ACTORS_CODE_FILES": "3"}) == CodeSettings(max_files=3)
