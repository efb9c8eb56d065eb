"""An agent's state, with a clock that the test moves."""

from __future__ import annotations

import itertools

from agentd import node_state as s
from agentd import state_events as e
from rlinf_actors.wire.agent_messages import StartWorkers, Welcome
from rlinf_actors.wire.values import Endpoint, ExitReport, WorkerSpec

UP = Endpoint("h", "ipc://x")
GONE = ExitReport("exited", 0)
LOOK = e.CheckHead(2.0)


def spec(id: str) -> WorkerSpec:
    return WorkerSpec(id, "g", "ns", 0, 1, 0, {})


def order(*specs: WorkerSpec) -> StartWorkers:
    return StartWorkers(list(specs), "d1", "m:C", "{}")


class Kit:
    def __init__(self) -> None:
        names = (f"life{n}" for n in itertools.count(1))
        self.state = s.AgentState(lambda: next(names), lambda: 0.5, s.Policy(head_grace_s=120.0, stop_grace_s=3.0))
        self.now = 100.0

    def do(self, event: e.Event, after: float = 0.0) -> list[e.Command]:
        self.now += after
        return self.state.handle(event, self.now)

    def join(self) -> Kit:
        self.do(e.StartSession())
        self.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
        return self

    def start(self, *ids: str) -> list[e.Command]:
        return self.do(e.HeadNotice(order(*map(spec, ids))))

    def silence(self) -> list[e.Command]:
        """Tick at every deadline until a reachability check of the head begins."""
        while True:
            self.now = self.state.next_deadline()
            out = self.state.handle(e.Tick(), self.now)
            if LOOK in out:
                return out
