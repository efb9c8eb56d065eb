from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_kit import example_status
from estop_kit import Machine

from rlinf_actors.cli import app, queries
from rlinf_actors.wire.client_messages import Status


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`rlinf-actors` on the PATH."""
    script = tmp_path / "rlinf-actors"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlinf_actors.cli.main "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command against a status (by default the example); return exit code, stdout and stderr."""
    monkeypatch.delenv("RLINF_HEAD", raising=False)

    def run(*arguments: str, status: Status | None = None) -> tuple[int, str, str]:
        monkeypatch.setenv("RLINF_HEAD", "127.0.0.1:6380")
        answer = status or example_status()
        # first this one: its module takes the function from queries when it is imported
        monkeypatch.setattr("rlinf_actors.cli.plan_command.fetch_status", lambda endpoint, settings: answer)
        monkeypatch.setattr(queries, "fetch_status", lambda endpoint, settings: answer)
        code = app.run(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[tuple[Machine, str, str]]:
    with tempfile.TemporaryDirectory(prefix="estop-") as folder, ExitStack() as ends:
        made = Machine(Path(folder), ends)
        yield made, made.head()[1], made.head()[1]


@pytest.fixture
def lab(shared_lab: tuple[Machine, str, str]) -> Iterator[tuple[Machine, str, str]]:
    """A machine with two heads that the tests of a module share. The test's emergency stop of all jobs ends with it."""
    yield shared_lab
    machine, *addresses = shared_lab
    for address in addresses:
        machine.ask(address, "estop", "--release")


@pytest.fixture
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="estop-") as folder, ExitStack() as ends:  # a short path, for unix sockets
        yield Machine(Path(folder), ends)
