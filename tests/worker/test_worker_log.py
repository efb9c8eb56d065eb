"""The loggers of workers and drivers: which handler writes a message, and in which format."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.settings import for_workers, log_format
from rlinf_actors.worker.context import make_logger
from rlinf_actors.worker.log_format import KEYS, JsonFormatter, parsed

pytestmark = pytest.mark.quick


@pytest.fixture
def logger(monkeypatch):
    """A function that makes a worker's logger, as in a process where nothing is configured yet."""
    made = []

    def make(**environ):
        monkeypatch.setattr(logging.root, "handlers", [])  # not before: pytest adds its own for the test's call
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        made.append(make_logger(f"log-test:{len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.handlers.clear()
        one.setLevel(logging.NOTSET)


def test_message_is_written_once_wherever_the_program_has_its_handler(logger):
    own = logger()
    own.info("ours")
    assert sys.stderr.getvalue().count("ours") == 1
    theirs = logging.StreamHandler(io.StringIO())
    for place in (own, logging.getLogger("rlinf_actors.worker"), logging.getLogger("rlinf_actors"), logging.root):
        place.addHandler(theirs)
        own.info("theirs")
        place.removeHandler(theirs)
        assert theirs.stream.getvalue().count("theirs") == 1
        theirs.stream = io.StringIO()
    assert "theirs" not in sys.stderr.getvalue()
    own.info("ours again")
    assert "ours again" in sys.stderr.getvalue()


def test_level_that_the_program_has_set_stays(logger):
    logging.getLogger("rlinf_actors.worker.log-test:0").setLevel(logging.ERROR)
    own = logger()
    own.info("hidden")
    own.error("shown")
    assert "hidden" not in sys.stderr.getvalue()
    assert own.level == logging.ERROR


def test_unknown_format_is_said_and_text_is_written(logger):
    logger(RLINF_ACTORS_LOG_FORMAT="xml").info("hello")
    said = sys.stderr.getvalue()
    assert "RLINF_ACTORS_LOG_FORMAT: is 'xml'; it must be text or json; the level is INFO" in said
    assert said.endswith("] hello\n")
    with pytest.raises(ConfigError, match="text or json"):
        log_format({"RLINF_ACTORS_LOG_FORMAT": "xml"})


def test_json_has_all_keys_in_one_line(logger):
    own = logger(RLINF_ACTORS_LOG_FORMAT="json")
    own.warning("a\nb %s", '"c"', stack_info=True)
    (line,) = sys.stderr.getvalue().splitlines()
    found = parsed(line)
    assert found == json.loads(line)
    assert tuple(found) == KEYS
    assert (found["message"], found["level"], found["logger"]) == ('a\nb "c"', "WARNING", own.name)
    assert found["exception"].startswith("Stack (most recent call last)")
    assert (found["group"], found["rank"]) == ("", None), "outside a worker"


def test_strings_that_are_no_text_are_written(logger):
    record = logging.makeLogRecord({"msg": "\udcff\u2028", "levelname": "INFO"})
    line = JsonFormatter(lambda: dict.fromkeys(KEYS[2:6], "")).format(record)
    assert line.count("\n") == 0
    assert parsed(line)["message"] == "\udcff\u2028"


@pytest.mark.parametrize("line", ["", "{", '{"time": 1}', '{"time"', "[INFO] x", '{"time": 1, "level": 2}', "[1]"])
def test_other_lines_are_not_taken_for_records(line):
    assert parsed(line) is None


def test_workers_get_the_format_of_their_driver():
    assert for_workers({"RLINF_ACTORS_LOG_FORMAT": "json"}) == {"RLINF_ACTORS_LOG_FORMAT": "json"}
