"""In any history of launches, ends and silence, no two workers that may run have one robot, and no robot is lost."""

from __future__ import annotations

import itertools

import msgspec
from head_kit import HeadKit, agent_hello, specs
from head_status import status_of
from hypothesis import given
from hypothesis import strategies as st

from rlinf_actors.head.claims import SETTLE_S
from rlinf_actors.wire.agent_messages import Beat, StartWorkers
from rlinf_actors.wire.client_messages import Launch, Launched, StopGroup
from rlinf_actors.wire.template_protocol import ROBOT_GONE_S
from rlinf_actors.wire.values import Claim

ARMS = [Claim(f"Arm:{n}", f"Arm {n}") for n in range(3)]
HOLD_S = 30.0

arms = st.lists(st.sets(st.sampled_from(ARMS), min_size=1), min_size=1, max_size=2)
launches = st.tuples(st.just("launch"), arms, st.sampled_from([0, 1]), st.sampled_from([0.0, 5.0, 500.0]))
others = st.one_of(
    st.tuples(st.just("exit"), st.integers(0, 20)),
    st.tuples(st.just("stop"), st.integers(0, 20)),
    st.tuples(st.just("silence")),
    st.tuples(st.just("return")),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 4.0, 35.0])),
)
steps = st.lists(st.one_of(launches, others), min_size=8, max_size=25)


class Model:
    """A head with node n0, always present, and n1, which comes and goes; and the workers that may run."""

    def __init__(self) -> None:
        self.kit = HeadKit(rank_hold_s=HOLD_S)
        self.kit.cluster(2)
        self.names = itertools.count()
        self.running: dict[str, tuple[str, set[str], int]] = {}  # worker id to its group, arms and node
        self.lost: dict[str, float] = {}  # workers on a lost node, and the time until which they may run
        self.waiting: dict[str, tuple[set[str], float]] = {}  # group to its arms and deadline
        self.there = True

    def see(self) -> None:
        """New workers must not share an arm with workers that may still run."""
        for start in self.kit.sent(StartWorkers):
            for spec in start.workers:
                self.waiting.pop(spec.group, None)
                keys = {claim.key for claim in spec.claims}
                for group, held, _ in self.running.values():
                    assert group == spec.group or not held & keys
                self.running[spec.id] = (spec.group, keys, spec.node_rank)
        for refusal in self.kit.refusals():
            for group in [
                group for group in self.waiting if f"{group}:" in refusal.text or f"'{group}'" in refusal.text
            ]:
                del self.waiting[group]
        self.kit.out = []

    def expire(self) -> None:
        for id in [id for id, until in self.lost.items() if self.kit.now >= until]:
            del self.lost[id], self.running[id]
        for group in [group for group, (_, until) in self.waiting.items() if self.kit.now >= until]:
            del self.waiting[group]

    def wait(self, seconds: float) -> None:
        end = self.kit.now + seconds
        while self.kit.now < end:
            self.kit.out = self.kit.wait(min(0.5, end - self.kit.now))
            self.expire()
            self.see()
            for peer in ("a:n0", "d1", *([self.peer] if self.there else [])):
                self.kit.tell(peer, Beat("x"))
                self.see()

    peer = "a:n1"

    def launch(self, wanted, node, wait_s) -> None:
        name = f"g{next(self.names)}"
        made = specs(name, [node] * len(wanted))
        workers = [msgspec.structs.replace(s, claims=sorted(w, key=str)) for s, w in zip(made, wanted, strict=True)]
        free = not any({c.key for c in claims} & held for claims in wanted for _, held, _ in self.running.values())
        answer = self.kit.ask("d1", Launch("ns", name, "m:C", workers, wait_s=wait_s))
        assert isinstance(answer, Launched) == (free and (node == 0 or self.there))
        if answer is None:
            self.waiting[name] = {claim.key for claims in wanted for claim in claims}, self.kit.now + wait_s
        self.see()

    def end(self, number: int) -> None:
        living = sorted(self.running.keys() - self.lost.keys())
        if living:
            id = living[number % len(living)]
            node = self.running.pop(id)[2]
            self.kit.exited(self.peer if node else "a:n0", id)
            self.see()

    def stop(self, number: int) -> None:
        self.kit.ask("d1", StopGroup("ns", f"g{number}", 0.0))
        self.see()

    def silence(self) -> None:
        if self.there:
            self.there = False
            last = self.kit.now
            self.wait(self.kit.timing.lease_s + 0.5)
            assert self.kit.node_states()["n1"] == "lost"
            for id, (_, _, node) in self.running.items():
                if node == 1:
                    self.lost.setdefault(id, last + self.kit.timing.robot_lease_s + HOLD_S)

    def come_back(self) -> None:
        if not self.there:
            self.there = True
            for id, until in self.lost.items():  # workers that a new agent does not report are being stopped
                self.lost[id] = min(until, self.kit.now + ROBOT_GONE_S + SETTLE_S)
            self.peer = f"a:n1-{next(self.names)}"
            self.kit.ask(self.peer, agent_hello("n1", self.peer, ip="10.0.0.2"))
            self.see()
            self.kit.nodes(2)


@given(steps)
def test_robot_belongs_to_one_group_until_no_worker_can_move_it(history):
    model = Model()
    for name, *rest in history:
        {
            "launch": model.launch,
            "exit": model.end,
            "stop": model.stop,
            "silence": model.silence,
            "return": model.come_back,
            "wait": model.wait,
        }[name](*rest)
        held = {lease.key for lease in status_of(model.kit.head, model.kit.now).leases}
        assert held == set().union(*(keys for _, keys, _ in model.running.values()))
        assert all(wanted & held for wanted, _ in model.waiting.values()), "a launch waits although its arms are free"
