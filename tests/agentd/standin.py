"""A worker main for tests: sends WorkerUp, runs the code in the variable DO, ends when its control socket closes."""

import os
import signal
import socket
import sys

from rlinf_actors.wire import template_protocol
from rlinf_actors.wire.values import Endpoint


def run_worker(spec, place, control, guarded=None):
    sock = socket.socket(fileno=control)
    scope = {"spec": spec, "place": place, "sock": sock, "os": os, "sys": sys, "signal": signal}
    if guarded is not None:  # as a guard that never says anything again
        said = template_protocol.encode(template_protocol.Renewed(spec.id, place.lease_until))
        os.write(guarded.socket, said)
    exec(os.environ.get("FIRST", ""), scope)
    sock.send(template_protocol.encode(template_protocol.WorkerUp(spec.id, Endpoint(place.host), 1000 + spec.rank, 0)))
    exec(os.environ.get("DO", ""), scope)
    while sock.recv(1024):
        pass
