"""RLINF_LOG_LEVEL in a driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlinf_actors.errors import ConfigError
from rlinf_actors.runtime import driver_log

SOURCE = """
import logging
{own}
from rlinf_actors.runtime import driver_log
for _ in range(2):
    driver_log.set_up({environ})
logging.getLogger("rlinf_actors.group").info("changed")
logging.getLogger("rlinf_actors.group").warning("odd")
"""


@pytest.mark.parametrize(
    ("own", "environ", "said"),
    [
        ("", {}, ["odd"]),
        ("", {"RLINF_LOG_LEVEL": "info"}, ["changed", "odd"]),
        ("", {"RLINF_LOG_LEVEL": "ERROR"}, []),
        ("logging.basicConfig(format='mine %(message)s')", {"RLINF_LOG_LEVEL": "INFO"}, ["mine changed", "mine odd"]),
    ],
)
def test_level_decides_what_the_driver_shows_once(own, environ, said):
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.format(own=own, environ=environ)], capture_output=True, text=True, check=True
    )
    assert [line.rpartition("] ")[2] for line in done.stderr.splitlines()] == said


def test_unknown_level_is_refused():
    with pytest.raises(ConfigError, match="RLINF_LOG_LEVEL: is 'verbose'; it must be one of DEBUG, INFO"):
        driver_log.set_up({"RLINF_LOG_LEVEL": "verbose"})


def test_records_of_other_processes_can_be_made_in_a_driver():
    source = """
import logging
from rlinf_actors.runtime import driver_log
driver_log.make_harmless()
record = logging.makeLogRecord({"name": "theirs", "msg": "from a %s", "args": ("socket",)})
assert (record.name, record.getMessage()) == ("theirs", "from a socket")
"""
    subprocess.run([sys.executable, "-c", source], check=True)
