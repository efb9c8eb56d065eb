"""Limits of starting an interpreter."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import zmq

from benchmarks.cases.import_time import interpreter_s
from benchmarks.model import Figures
from benchmarks.timing import clock

_DAEMON = """
import asyncio, sys, msgspec, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(b"up")
socket.recv()
"""


def import_time() -> Figures:
    return {"empty": interpreter_s("pass")}


def cluster_start() -> Figures:
    """Start a process that imports a daemon's modules and reports over ipc, then end it and wait."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        endpoint = f"ipc://{folder}/s"
        socket.bind(endpoint)
        start = clock()
        with subprocess.Popen([sys.executable, "-c", _DAEMON, endpoint]) as daemon:
            who, _ = socket.recv_multipart()
            up = clock()
            socket.send_multipart([who, b"end"])
            daemon.wait()
        return {"start": up - start, "stop": clock() - up}
