"""A head that a member floods with requests still obeys SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pace
import pytest
import zmq

from rlinf_actors.net.framing import pack
from rlinf_actors.settings import INSECURE_TEST_NETWORK
from rlinf_actors.wire import control_codec
from rlinf_actors.wire.client_messages import GetStatus

pytestmark = pytest.mark.live
HEAD = "import sys; {}; from rlinf_actors.cli.main import main; sys.exit(main())"


def flood(
    context: zmq.Context[zmq.Socket[bytes]], address: str, flooded: threading.Event, over: threading.Event
) -> None:
    """Send chunks of 5,000 requests, and read no answer, until *over*."""
    request = control_codec.encode(control_codec.Request(1, GetStatus("")))
    chunk, _, count = pack([(request, [])] * 5000)
    assert count == 5000
    with context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.setsockopt(zmq.SNDTIMEO, 50)
        sender.connect(f"tcp://{address}")
        sent = 0
        while not over.is_set():
            try:
                sender.send(chunk)
            except zmq.Again:
                continue  # the head's buffers are full
            sent += 1
            if sent == 500:
                flooded.set()


@pytest.mark.parametrize("loop", ["pass", "sys.modules['uvloop'] = None"], ids=["uvloop", "asyncio"])
def test_flooded_head_obeys_sigterm(loop: str, tmp_path: Path, rlinf_leak_check: None) -> None:
    command = [sys.executable, "-c", HEAD.format(loop), "head", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, INSECURE_TEST_NETWORK: "1"}
    flooded, over = threading.Event(), threading.Event()
    with (
        subprocess.Popen(
            [*command, "--state-dir", str(tmp_path / "state")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        ) as head,
        zmq.Context() as context,
    ):
        assert head.stdout is not None
        thread = threading.Thread(target=flood, args=(context, head.stdout.readline().strip(), flooded, over))
        thread.start()
        try:
            assert flooded.wait(pace.PATIENCE_S)
            head.send_signal(signal.SIGTERM)
            assert head.wait(pace.PATIENCE_S) == 0
        finally:
            over.set()
            head.kill()
            thread.join()
