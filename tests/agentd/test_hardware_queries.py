"""Hardware queries of an agent: in its session with the head, and the answers for each end of the child process."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import venv
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
import pytest_asyncio
from lease import leased

from agentd import node_report
from agentd import state_events as e
from agentd.launch_plan import Rules
from agentd.node_report import HardwareQueries, read_answer
from agentd.session import Session
from agentd.users import User, Users
from rlinf_actors.errors import ClusterTimeoutError, NodeLostError
from rlinf_actors.hardware.child_process import ChildEnd, run_child
from rlinf_actors.head import operations
from rlinf_actors.head.commands import Timing
from rlinf_actors.head.server import HeadServer
from rlinf_actors.net.rpc import ControlClient
from rlinf_actors.wire.agent_messages import ClientHello, Goodbye, LookForHardware, StopLooking
from rlinf_actors.wire.client_messages import Enumerated, EnumerateHardware, GetNodes
from rlinf_actors.wire.launch_rules import Launcher
from rlinf_actors.wire.protocol import PROTOCOL
from rlinf_actors.wire.values import HardwareAnswer, HardwareQuestion, NodeReport, Piece
from tests.memory_network import MemoryNetwork

ROOT = str(Path(__file__).resolve().parents[2])
ENDPOINT = "ipc:///nowhere/head"
ANSWER = HardwareAnswer([Piece("Arm", "v1")])
ASKED = EnumerateHardware("n0", HardwareQuestion("Arm", 0))


class NoWorkers:
    log_reader = SimpleNamespace(cancel=lambda id: None)  # no question for a log file waits

    def start(self, order):
        """Never called."""

    def acknowledged(self, ids):
        """No worker has ended."""

    def registered(self, keep_s, packet):
        """There is no state to keep."""

    def stop(self, ids, grace_s, reason=""):
        """There are no workers."""

    def renew(self, until, lease_s):
        """There are no workers."""

    def flush_logs(self, owner, wait_s):
        """There is no output."""

    def credit_logs(self, chars, owner):
        """There is no output."""

    async def close(self, grace_s, reason=""):
        """There are no workers."""


class Lab:
    """A head, an agent whose queries end when the test sets `answer`, and a driver."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.network = MemoryNetwork(loop)
        self.head = HeadServer(self.network, timing=Timing(beat_s=0.05, lease_s=30.0))
        self.head.start([ENDPOINT])
        self.begun: asyncio.Queue[HardwareQuestion] = asyncio.Queue()
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.answer: asyncio.Future[HardwareAnswer] = loop.create_future()
        report = NodeReport("n0", "n0", "127.0.0.1", "h", 1, 1, "3", "/py")
        self.agent = Session(
            self.network, ENDPOINT, report, query_hardware=lambda question, driver: self._query(question)
        )
        self.agent.attach(NoWorkers())
        self.running = loop.create_task(self.agent.run())
        self.driver = ControlClient(self.network, ENDPOINT, b"driver:d1", lambda notice: None)

    async def _query(self, question):
        self.begun.put_nowait(question)
        try:
            return await self.answer
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise

    async def connect(self):
        await self.driver.request(ClientHello(PROTOCOL, "1", "d1", "driver", "ns", "elsewhere", 0, 0), 5)
        await self.driver.request(GetNodes(1, 5.0), 5)

    async def close(self):
        self.agent.stop("the test ends")
        await self.running
        self.driver.close()
        self.head.close()
        self.network.close()


@pytest_asyncio.fixture
async def lab():
    made = Lab()
    await made.connect()
    yield made
    await made.close()


def ask(lab: Lab) -> asyncio.Future:
    return asyncio.ensure_future(lab.driver.request(ASKED, 5))


async def test_answer_of_the_agent_reaches_the_driver(lab):
    asked = ask(lab)
    assert await lab.begun.get() == ASKED.question
    lab.answer.set_result(ANSWER)
    assert await asked == Enumerated(ANSWER)


async def test_query_that_fails_in_agentd_answers_with_the_reason(lab, caplog):
    asked = ask(lab)
    await lab.begun.get()
    lab.answer.set_exception(OSError(24, "Too many open files"))
    answer = (await asked).answer
    assert answer.kind == "failed"
    assert answer.text.startswith("its agentd cannot look for it (OSError: [Errno 24] Too many open files)")
    assert not lab.running.done()
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.exc_info


async def test_end_of_the_driver_cancels_its_query(lab):
    asked = ask(lab)
    await lab.begun.get()
    lab.driver.notify(Goodbye("done"))
    assert await lab.ended.get() == "cancelled"
    asked.cancel()


async def test_query_cancelled_before_it_began_is_forgotten(lab):
    lab.agent._shell.handle(e.HeadNotice(LookForHardware("l1", ASKED.question)))
    (query,) = lab.agent._queries.values()
    lab.agent._shell.handle(e.HeadNotice(StopLooking("l1")))
    await asyncio.wait([query])
    await asyncio.sleep(0)
    assert (lab.begun.empty(), lab.agent._queries) == (True, {})


async def test_repeated_query_runs_once(lab):
    asked = ask(lab)
    await lab.begun.get()
    (id,) = lab.agent._queries
    lab.agent._shell.handle(e.HeadNotice(LookForHardware(id, ASKED.question)))  # repeated over a new connection
    lab.answer.set_result(ANSWER)
    assert await asked == Enumerated(ANSWER)
    assert lab.begun.empty()


async def test_stopped_agent_fails_the_request(lab):
    asked = ask(lab)
    await lab.begun.get()
    lab.agent.stop("maintenance")
    with pytest.raises(NodeLostError, match=r"node n0 .* was lost while it looked for its Arm: its agentd was stopped"):
        await asked
    assert await lab.ended.get() == "cancelled"


async def test_endless_query_times_out_and_is_cancelled(lab, monkeypatch):
    monkeypatch.setattr(operations, "SPARE_S", -9.9)
    with pytest.raises(ClusterTimeoutError, match=r"gave no answer in \d+ s when asked for its Arm"):
        await ask(lab)
    assert await lab.ended.get() == "cancelled"


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (ChildEnd(None), "enumerate() of Arm gave no answer within 10 s; it was killed"),
        (ChildEnd(None, note="its process cannot be started: no"), "its process cannot be started: no"),
        (ChildEnd(-11), "enumerate() of Arm crashed its process (SIGSEGV)"),
        (ChildEnd(2, errors="a\nb\n"), "enumerate() of Arm ended its process with exit code 2; its last words: b"),
        (ChildEnd(0), "enumerate() of Arm left no readable answer (Input data was truncated): b''"),
        (ChildEnd(0, b"\xff"), "enumerate() of Arm left no readable answer ("),
        (ChildEnd(0, b"[" * 100_000), "enumerate() of Arm left no readable answer ("),
        (ChildEnd(0, b'{"pieces": [{"type": 5}]}'), "enumerate() of Arm left no readable answer (Expected `str`"),
    ],
)
def test_child_end_becomes_a_failed_answer(end, text):
    answer = read_answer(end, "enumerate() of Arm", 10)
    assert answer.kind == "failed"
    assert answer.text.startswith(text)
    assert answer.pieces == []


def test_answer_of_a_child_is_returned_unchanged():
    assert read_answer(ChildEnd(0, msgspec.json.encode(ANSWER)), "x", 10) == ANSWER


async def test_forbidden_interpreter_is_not_started(tmp_path):
    rules = Rules("n0", "", own="/usr/bin/own-python", allowed=("/nowhere",))
    looker = HardwareQueries(rules, str(tmp_path), lambda: dict(os.environ), described=False, users=Users.of_agentd())
    answer = await looker.query(HardwareQuestion("Arm", 0, interpreter=sys.executable))
    assert answer.kind == "failed"
    assert "is not below a directory that agentd allows there (/nowhere)" in answer.text


async def test_variable_with_a_nul_byte_is_refused(tmp_path):
    looker = HardwareQueries(Rules("n0", ""), str(tmp_path), dict, described=False, users=Users.of_agentd())
    answer = await looker.query(HardwareQuestion("Arm", 0, env={"A": "\0"}))
    assert answer.text == "A holds a NUL byte, which no environment can"


async def test_interpreter_without_our_packages_names_packages_to_install(tmp_path):
    await asyncio.to_thread(venv.create, tmp_path / "venv", symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    (tmp_path / "rlinf_actors").symlink_to(f"{ROOT}/rlinf_actors")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    looker = HardwareQueries(Rules("n0", ""), str(tmp_path), lambda: env, described=False, users=Users.of_agentd())
    answer = await looker.query(HardwareQuestion("Arm", 0, interpreter=python))
    assert answer.kind == "failed"
    assert answer.text.startswith(f"interpreter {python} has no msgspec (No module named 'msgspec'): run '{python} -m ")


@pytest.mark.parametrize(("described", "skipped"), [(True, True), (False, False)])
async def test_described_node_skips_the_hardware_check(tmp_path, described, skipped):
    (tmp_path / "lab_arm.py").write_text(ARM)
    looker = HardwareQueries(
        Rules("n0", ""), ROOT, lambda: dict(os.environ), described=described, users=Users.of_agentd()
    )
    env = {"PYTHONPATH": str(tmp_path), "RLINF_EXT_MODULE": "lab_arm"}
    answer = await looker.query(HardwareQuestion("LabArm", 4, '[{"node_rank": 4}]', env=env))
    assert (answer.kind, answer.text) == ("", "")
    assert [piece.model for piece in answer.pieces] == [f"4 {skipped}"]


ARM = """
from dataclasses import dataclass
from rlinf_actors import Hardware, HardwareConfig, HardwareInfo, HardwareResource, NodeHardwareConfig

@NodeHardwareConfig.register_hardware_config("LabArm")
@dataclass
class LabArmConfig(HardwareConfig):
    disable_validate: bool = False

@Hardware.register()
class LabArm(Hardware):
    @classmethod
    def enumerate(cls, node_rank, configs=None):
        infos = [HardwareInfo("LabArm", f"{node_rank} {arm.disable_validate}") for arm in configs]
        return HardwareResource("LabArm", infos)

def register():
    pass
"""


@pytest.fixture
def place():
    """A directory that all users can reach, with a program of user 61021."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o711)
        program = Path(made, "python")
        program.write_text("#!/bin/sh\necho $(id -u) $(id -G) $LD_PRELOAD $(ulimit -c)\n")
        program.chmod(0o755)
        os.chown(program, 61021, 61030)
        yield Path(made)


@pytest.mark.live
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
async def test_users_interpreter_runs_as_that_user_and_does_not_hold_agentd(monkeypatch, place):
    """Its user can hold its execution up by a lease, and has a say about its environment."""
    lab = User("lab", 61021, 61030, (61030,), "/", "/bin/sh", "/", "/", limits={"core": 0})
    started = []

    async def run(*given, **options):
        started.append((options["through"], options["env"]))
        return await run_child(*given, **options)

    monkeypatch.setattr(node_report, "run_child", run)
    program = place / "python"
    users = mock.Mock(import_path=str(place), of_driver=lambda driver: lab)
    looker = HardwareQueries(Rules("n0", ""), "/", lambda: {"PATH": "/usr/bin:/bin"}, described=True, users=users)
    with leased(program, lab.uid) as lease:
        question = HardwareQuestion("Arm", 0, interpreter=str(program), env={"LD_PRELOAD": ""}, limit_s=60)
        query = asyncio.ensure_future(looker.query(question, Launcher("d")))
        await asyncio.to_thread(lease.asked)
        assert not query.done()
    assert "61021 61030 0" in (await query).text
    (((python, *_), env),) = started
    assert (python, env) == (sys.executable, {}), "what runs before the change of the user is agentd's own"
