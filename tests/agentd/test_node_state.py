"""agentd's decisions about its session, with a clock that the test moves."""

from __future__ import annotations

import itertools

import pytest
from state_kit import GONE, LOOK, Kit, spec

from agentd import node_state as s
from agentd import state_events as e
from agentd.node_state import SESSION_STATES, SessionState
from rlinf_actors.errors import (
    AuthenticationError,
    ClusterTimeoutError,
    ConfigError,
    NodeLostError,
    ProtocolError,
    ProtocolMismatchError,
    WrongServerError,
)
from rlinf_actors.net.failure_detection import RETRY_MIN_S
from rlinf_actors.wire.agent_messages import (
    HELLO_AGAIN,
    Beat,
    Goodbye,
    ProcessGone,
    StartWorkers,
    Welcome,
    WorkerExited,
)
from rlinf_actors.wire.values import ExitReport

# --- the session's states ---

ROWS = {
    (SessionState.JOINING, "welcomed"): SessionState.JOINED,
    (SessionState.JOINING, "failed"): SessionState.JOINING,
    (SessionState.JOINING, "refused"): SessionState.ENDED,
    (SessionState.JOINING, "cut_off"): SessionState.RESETTING,
    (SessionState.JOINING, "drain"): SessionState.DRAINING,
    (SessionState.JOINED, "welcomed"): SessionState.JOINED,
    (SessionState.JOINED, "forgotten"): SessionState.JOINING,
    (SessionState.JOINED, "cut_off"): SessionState.RESETTING,
    (SessionState.JOINED, "drain"): SessionState.DRAINING,
    (SessionState.RESETTING, "empty"): SessionState.JOINING,
    (SessionState.RESETTING, "drain"): SessionState.DRAINING,
    (SessionState.DRAINING, "welcomed"): SessionState.DRAINING,
    (SessionState.DRAINING, "empty"): SessionState.ENDED,
}


def test_session_state_transitions_match_the_table():
    events = ["welcomed", "failed", "refused", "cut_off", "forgotten", "drain", "empty"]
    for state, event in itertools.product(SessionState, events):
        assert SESSION_STATES[state].get(event) is ROWS.get((state, event)), (state, event)


def test_an_impossible_event_names_the_session_state():
    kit = Kit().join()
    with pytest.raises(ProtocolError, match="'empty' is not expected of a session that is joined"):
        kit.do(e.WorkersClosed())


# --- joining ---


def test_session_begins_with_a_hello():
    assert Kit().do(e.StartSession()) == [e.SayHello("life1", 2.5)]


def test_welcome_registers_the_node_and_starts_jittered_beats():
    kit = Kit()
    kit.do(e.StartSession())
    assert kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0))) == [e.Registration("epoch", 10.0)]
    assert kit.state.next_deadline() == kit.now + 0.5
    assert kit.do(e.Tick(), 0.5) == [e.SendNotice(Beat("life1", kit.now))]
    assert kit.state.next_deadline() == kit.now + 1.0


def test_hello_without_an_answer_is_repeated_with_growing_jittered_pauses():
    kit = Kit()
    kit.do(e.StartSession())
    pauses, patience, said = [], [], []
    for _ in range(7):
        *says, hello = kit.do(e.HelloFailed(ClusterTimeoutError("no answer")), 11)
        said += [(kit.now - 100, action.text) for action in says]
        assert isinstance(hello, e.SayHello)
        assert hello.anew
        pauses.append(hello.delay_s)
        patience.append(hello.timeout_s)
    assert pauses == pytest.approx([0.15, 0.3, 0.6, 1.2, 2.25, 2.25, 2.25])
    assert patience == [2.5] + [5.0] * 6
    assert said == [(11, "not registered yet: no answer"), (77, "not registered yet: no answer (for 66 s now)")]
    assert kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)), 1)[0] == e.LogStatus("the head is there, after 67 s")


def test_several_hellos_fit_into_one_lease():
    """This holds for short leases too. Each hello waits longer, because the head may be slow."""
    kit = Kit().join()
    kit.do(e.Welcomed(Welcome("epoch", "1.0", 0.1, 1.0)))
    hellos = kit.do(e.ConnectionLost())
    for _ in range(6):
        hellos += kit.do(e.HelloFailed(ClusterTimeoutError("no answer")), 1)[-1:]
    assert [hello.timeout_s for hello in hellos] == pytest.approx([0.25, 0.25, 0.5, 1.0, 2.0, 3.75, 3.75])
    kit.do(e.Welcomed(Welcome("epoch", "1.0", 0.1, 1.0)))
    assert [hello.timeout_s for hello in kit.do(e.ConnectionLost())] == [0.25]


def test_restarted_head_restores_credit_of_output_under_way():
    kit = Kit().join()
    kit.start("w1")
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    out = kit.do(e.Welcomed(Welcome("epoch2", "1.0", 1.0, 10.0)))
    assert e.CreditLogs(s.ALL_CREDIT, "ns") in out
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    assert not any(isinstance(a, e.CreditLogs) for a in kit.do(e.Welcomed(Welcome("epoch2", "1.0", 1.0, 10.0))))


def test_each_lost_connection_causes_one_hello():
    """The hello under way may be lost with the connection, and is said again over the one that was made since."""
    kit = Kit().join()
    assert kit.do(e.ConnectionLost()) == [e.SayHello("life1", 2.5)]
    hellos = [kit.do(e.ConnectionLost()) for _ in range(3)]
    assert [[(hello.delay_s, hello.anew) for hello in said] for said in hellos] == [
        [(pytest.approx(pause), False)] for pause in (0.15, 0.3, 0.6)
    ]


def test_changed_description_is_told_at_once():
    """Also while a hello with the old description is on its way."""
    kit = Kit().join()
    assert kit.do(e.NodeDescribed()) == [e.SayHello("life1", 2.5)]
    assert [type(one) for one in kit.do(e.NodeDescribed())] == [e.SayHello]


def test_hello_that_a_busy_head_has_received_is_not_repeated():
    kit = Kit()
    kit.do(e.StartSession())
    assert kit.do(e.HelloWaits("it is busy"), 2.5) == [e.LogStatus("not registered yet: it is busy")]
    assert kit.do(e.HelloWaits("it is busy"), 2.5) == []
    assert kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))[-1] == e.Registration("epoch", 10.0)


def test_head_that_receives_beats_and_answers_none_gets_no_hello():
    kit = Kit().join()
    kit.start("w1")
    began = kit.now
    kit.silence()
    (says,) = kit.do(e.HeadChecked(there=True, stands=True))
    assert "its machine does; workers go on for 120 s" in says.text
    sent, ended = set(), []
    while not ended:
        kit.now = kit.state.next_deadline()
        for action in kit.do(e.Tick()):
            sent.add(type(action))
            ended += [action] if isinstance(action, e.StopWorkers) else []
            if isinstance(action, e.CheckHead):
                answer = kit.do(e.HeadChecked(there=True, stands=True))
                assert {type(action) for action in answer} <= {e.LogStatus}
    assert sent == {e.SendNotice, e.CheckHead, e.LogStatus, e.StopWorkers}
    assert kit.now == began + 120


def test_head_that_answers_its_beats_late_is_there_again():
    kit = Kit().join()
    kit.silence()
    kit.do(e.HeadChecked(there=True, stands=True))
    assert kit.do(e.HeadNotice(Beat("epoch", kit.now - 2)), 7) == [e.LogStatus("the head is there, after 7 s")]
    kit.silence()
    kit.do(e.HeadChecked(there=True, stands=True))
    assert kit.do(e.ConnectionLost()) == [e.SayHello("life1", 2.5)]


def test_ends_of_watched_processes_are_reported_to_each_head_once():
    kit = Kit().join()
    assert kit.do(e.ProcessEnded("d1")) == [e.SendNotice(ProcessGone("d1"))]
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    assert kit.do(e.ProcessEnded("d2")) == []
    out = kit.do(e.Welcomed(Welcome("epoch2", "1.0", 1.0, 10.0)))
    assert [a.body for a in out if isinstance(a, e.SendNotice)] == [ProcessGone("d1"), ProcessGone("d2")]
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    assert not any(isinstance(a, e.SendNotice) for a in kit.do(e.Welcomed(Welcome("epoch2", "1.0", 1.0, 10.0))))


@pytest.mark.parametrize("error", [ProtocolMismatchError("v1, v2"), ConfigError("rank"), AuthenticationError("no")])
def test_refused_agent_ends_with_78_and_the_reason(error):
    kit = Kit()
    kit.do(e.StartSession())
    (end,) = kit.do(e.HelloFailed(error))
    assert isinstance(end, e.EndAgent)
    assert end.code == 78
    assert str(error) in end.text


def test_restart_of_the_head_ends_no_worker_and_is_logged_once():
    kit = Kit().join()
    kit.start("w1")
    (said,) = kit.do(e.HeadNotice(Goodbye("SIGTERM", restarting=True)))
    assert said == e.LogStatus("the head is being restarted; workers go on for 120 s")
    out = kit.do(e.ConnectionLost())
    assert [type(action) for action in out] == [e.SayHello]


class TestOwnersThatEnd:
    """The head stops an ended owner's workers; if the head does not answer, the agent of the owner's host does."""

    @pytest.fixture
    def kit(self):
        kit = Kit().join()
        kit.do(e.HeadNotice(StartWorkers([spec("mine")], "d1")))
        kit.do(e.HeadNotice(StartWorkers([spec("kept")], "d1", detached=True)))
        kit.do(e.HeadNotice(StartWorkers([spec("other")], "d2")))
        return kit

    def test_detached_group_outlives_its_owner(self, kit):
        given = StartWorkers([spec("mine")], "", detached=True)
        assert e.RecordOwner(given) in kit.do(e.HeadNotice(given))
        assert [(one.owner, one.detached) for one in kit.state.listed_workers() if one.spec.id == "mine"] == [
            ("", True)
        ]
        assert e.RecordOwner(given) not in kit.do(e.HeadNotice(given))
        kit.do(e.ProcessEnded("d1"))
        assert self.until_stopped(kit) == ([], None, None)

    def until_stopped(self, kit):
        """The stopped workers, the time until their stop, and their grace."""
        began = kit.now
        while kit.state.next_deadline() < began + 5:
            kit.now = max(kit.now, kit.state.next_deadline())
            for action in kit.state.handle(e.Tick(), kit.now):
                if isinstance(action, e.StopWorkers):
                    return action.ids, kit.now - began, action.grace_s
        return [], None, None

    def test_agent_stops_the_owners_workers_if_the_head_is_gone_too(self, kit):
        kit.do(e.ProcessEnded("d1"))
        assert self.until_stopped(kit) == (["mine"], pytest.approx(0.4), 0.4)

    def test_agent_stops_the_owners_workers_if_the_head_was_gone_before(self, kit):
        kit.do(e.ConnectionLost())
        kit.do(e.HelloFailed(ClusterTimeoutError("no answer")))
        kit.do(e.ProcessEnded("d1"))
        assert self.until_stopped(kit) == (["mine"], pytest.approx(0.4), 0.4)

    def test_agent_leaves_the_workers_to_a_head_that_answers(self, kit):
        kit.do(e.ProcessEnded("d1"))
        (beat,) = [a.body for a in kit.do(e.Tick()) if isinstance(a, e.SendNotice)]
        kit.do(e.HeadNotice(Beat("epoch", beat.at)), 0.3)
        assert self.until_stopped(kit)[0] == []

    def test_answer_to_an_earlier_beat_does_not_prove_that_the_head_lives(self, kit):
        kit.do(e.ProcessEnded("d1"))
        kit.do(e.HeadNotice(Beat("epoch", kit.now - 0.1)), 0.3)
        assert self.until_stopped(kit)[0] == ["mine"]

    def test_returned_head_gets_the_owners_end_and_stops_its_workers(self, kit):
        kit.do(e.ConnectionLost())
        kit.do(e.ProcessEnded("d1"))
        out = kit.do(e.Welcomed(Welcome("epoch2", "1.0", 1.0, 10.0)), 0.3)
        assert e.SendNotice(ProcessGone("d1")) in out
        assert self.until_stopped(kit)[0] == []

    def test_stalled_agent_waits_for_the_heads_answer_first(self, kit):
        kit.do(e.ProcessEnded("d1"))
        kit.do(e.Stalled(3.0), 3.0)
        assert self.until_stopped(kit) == (["mine"], pytest.approx(0.4), 0.4)


def test_a_refused_protocol_ends_no_worker_before_the_head_grace():
    """A head or agentd of a wrong version may have been installed by mistake, and may be replaced in time."""
    kit = Kit().join()
    kit.start("w1")
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    began = kit.now
    out = kit.do(e.HelloFailed(ProtocolMismatchError("upgrade the head first")))
    assert [type(action) for action in out] == [e.LogStatus, e.SayHello]
    assert out[0].urgent
    assert "upgrade the head first; workers go on for 120 s" in out[0].text
    kit.do(e.HeadChecked(True), 3)
    assert [type(action) for action in kit.do(e.HelloFailed(ProtocolMismatchError("no")))] == [e.SayHello]
    assert not any(isinstance(action, e.StopWorkers) for action in kit.do(e.Tick(), began + 119 - kit.now))
    assert any(isinstance(action, e.StopWorkers) for action in kit.do(e.Tick(), 2))
    kit.do(e.WorkersReported(WorkerExited("w1", GONE)))
    (*_, end) = kit.do(e.HelloFailed(ProtocolMismatchError("no")))
    assert isinstance(end, e.EndAgent)
    assert end.code == 78


def test_another_server_at_the_heads_address_is_logged_and_tried_again():
    """If the head is replaced by one with another key, perhaps by mistake, no worker ends before the grace."""
    kit = Kit().join()
    kit.start("w1")
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    out = kit.do(e.HelloFailed(WrongServerError("this is not the head, at tcp://h:1")))
    assert [type(action) for action in out] == [e.LogStatus, e.SayHello]
    assert "this is not the head, at tcp://h:1" in out[0].text
    assert out[1].anew


def test_lost_incarnation_registers_as_a_new_one():
    kit = Kit()
    kit.do(e.StartSession())
    out = kit.do(e.HelloFailed(NodeLostError("was declared lost")))
    assert (out[-1].incarnation, out[-1].delay_s, out[-1].anew) == ("life2", pytest.approx(0.15), True)


# --- beats and silence ---


def test_head_that_does_not_know_the_node_gets_a_hello_on_the_same_connection():
    kit = Kit().join()
    assert kit.do(e.HeadNotice(Beat(HELLO_AGAIN))) == [e.SayHello("life1", 2.5)]
    assert kit.do(e.HeadNotice(Beat(HELLO_AGAIN))) == []


def test_reachability_check_begins_after_three_missed_beats():
    kit = Kit().join()
    began = kit.now
    kit.silence()
    assert kit.now == began + 3
    assert LOOK not in kit.do(e.Tick(), 5)


def test_answer_of_the_heads_machine_keeps_workers_and_reconnects():
    kit = Kit().join()
    kit.start("w1")
    kit.silence()
    says, hello = kit.do(e.HeadChecked(there=True))
    assert "its machine does; workers go on for 120 s" in says.text
    assert hello == e.SayHello("life1", 2.5, pytest.approx(0.75 * RETRY_MIN_S), anew=True)
    assert [worker.spec.id for worker in kit.state.listed_workers()] == ["w1"]


def cut(kit: Kit) -> list[e.Command]:
    """Let every reachability check fail; return the commands of the first deadline that has any."""
    while True:
        kit.now = kit.state.next_deadline()
        out = [action for action in kit.do(e.Tick()) if not isinstance(action, e.SendNotice)]
        if out == [LOOK]:
            out = kit.do(e.HeadChecked(there=False))
        if out:
            return out


def test_silence_of_the_heads_machine_ends_workers_at_the_lease():
    kit = Kit().join()
    kit.start("w1", "w2")
    began = kit.now
    says, stop = cut(kit)
    assert kit.now == began + 10
    assert "the head was silent for 10 s, and so was its machine for 10 s: the network" in says.text
    assert stop == e.StopWorkers(["w1", "w2"], s.CUT_OFF_GRACE_S, says.text.removeprefix("workers end: "))
    assert kit.do(e.WorkersReported(WorkerExited("w1", GONE))) == [e.EndsAcknowledged(["w1"])]
    acknowledged, hello = kit.do(e.WorkersReported(WorkerExited("w2", GONE)))
    assert acknowledged == e.EndsAcknowledged(["w2"])
    assert (hello.incarnation, hello.anew) == ("life2", True)
    assert kit.state.listed_workers() == []


def test_new_incarnation_is_not_ended_by_the_earlier_silence():
    """The head's orders may arrive before its welcome, because the welcome waits for the disk."""
    kit = Kit().join()
    kit.start("w1")
    cut(kit)
    assert kit.do(e.WorkersReported(WorkerExited("w1", GONE)))[-1].incarnation == "life2"
    kit.start("w2")
    assert kit.do(e.Tick(), 0.1) == []
    assert kit.do(e.HeadChecked(there=False), 0.1) == []  # a check that began in the last incarnation
    kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
    assert [worker.spec.id for worker in kit.state.listed_workers()] == ["w2"]


def test_silence_before_the_first_order_ends_no_worker():
    kit = Kit()
    kit.do(e.StartSession())
    kit.do(e.HelloFailed(ClusterTimeoutError("no answer")), 1000)
    kit.start("w1")
    assert kit.do(e.Tick(), 0.1) == []
    kit.do(e.Welcomed(Welcome("epoch", "1.0", 1.0, 10.0)))
    assert [worker.spec.id for worker in kit.state.listed_workers()] == ["w1"]


def test_workers_end_after_the_grace_of_an_absent_head():
    kit = Kit().join()
    kit.start("w1")
    kit.silence()
    kit.do(e.HeadChecked(there=True))
    kit.do(e.HelloFailed(ClusterTimeoutError("no answer")), 50)
    while kit.state.next_deadline() < 100 + 120:  # the checks are repeated
        kit.now = kit.state.next_deadline()
        assert kit.do(e.Tick()) == [LOOK]
        assert kit.do(e.HeadChecked(there=True)) == []
    kit.now = 100 + 120
    (says, stop) = kit.do(e.Tick())
    assert stop == e.StopWorkers(["w1"], s.CUT_OFF_GRACE_S, says.text.removeprefix("workers end: "))
    assert "silent for 120 s, although its machine answers" in says.text


def test_network_cut_during_a_heads_absence_ends_workers_after_a_lease():
    kit = Kit().join()
    kit.start("w1")
    kit.silence()
    kit.do(e.HeadChecked(there=True))
    there = kit.now
    says, _ = cut(kit)
    assert kit.now == there + 10
    assert "so was its machine for 10 s" in says.text


def test_a_node_without_workers_waits_for_its_head_for_ever():
    kit = Kit().join()
    kit.do(e.HeadNotice(Beat(HELLO_AGAIN)))
    assert kit.state.next_deadline() == float("inf")


def test_message_of_the_head_overrides_a_failed_check():
    kit = Kit().join()
    kit.silence()
    kit.do(e.HeadNotice(Beat("epoch")))
    assert kit.do(e.HeadChecked(there=False)) == []
    assert kit.state.session is SessionState.JOINED


@pytest.mark.parametrize(
    "beat",
    [
        pytest.param("", id="the head tries the connection, since it does not hear us"),
        pytest.param("life1", id="our own: TCP can connect to itself where nobody listens"),
        pytest.param("epoch0", id="late, of an earlier head"),
    ],
)
def test_messages_that_answer_no_beat_do_not_end_the_silence(beat):
    kit = Kit().join()
    began = kit.now
    kit.now += 2
    assert kit.do(e.HeadNotice(Beat(beat, kit.now))) == []
    kit.start("w1")
    kit.silence()
    assert kit.now == began + 3


def test_own_stall_does_not_count_as_silence_of_the_head():
    kit = Kit().join()
    kit.do(e.Stalled(60), 60)
    assert kit.do(e.Tick()) == [e.SendNotice(Beat("life1", kit.now))]


# --- the end ---


def test_drain_stops_workers_then_sends_goodbye():
    kit = Kit().join()
    kit.start("w1")
    says, close = kit.do(e.StopAgent("SIGTERM"))
    assert "SIGTERM" in says.text
    assert close == e.CloseWorkers(3.0, "SIGTERM")
    assert kit.do(e.StopAgent("SIGTERM")) == []
    assert kit.do(e.StopAgent("the driver ended", 0.0)) == [e.StopWorkers(["w1"], 0.0, "the driver ended")]
    gone = WorkerExited("w1", GONE)
    assert kit.do(e.WorkersReported(gone)) == [e.SendNotice(gone)]
    goodbye, end = kit.do(e.WorkersClosed())
    assert goodbye == e.SendNotice(Goodbye("its agentd was stopped"))
    assert end == e.EndAgent(0, "stopped")


def test_start_order_during_a_drain_fails_with_the_reason():
    kit = Kit().join()
    kit.do(e.StopAgent("SIGTERM"))
    (sent,) = kit.start("w1")
    assert sent == e.SendNotice(WorkerExited("w1", ExitReport("start_failed", reason="its agentd is draining")))


@pytest.mark.parametrize("late", [e.HelloFailed(ClusterTimeoutError("x")), e.HelloFailed(ConfigError("x"))])
def test_late_answers_during_a_drain_are_ignored(late):
    kit = Kit()
    kit.do(e.StartSession())
    kit.do(e.StopAgent("SIGINT"))
    assert kit.do(late) == []
    assert kit.state.session is SessionState.DRAINING


def test_beats_of_agentds_whose_clocks_differ_reach_the_head_together():
    arrivals = []
    for ahead in (0.0, 0.013, 123.4567, -77.7):  # the head's clock minus agentd's
        kit = Kit().join()
        for _ in range(5):
            kit.now = kit.state.next_deadline()
            beats = [c.body.at for c in kit.do(e.Tick()) if isinstance(c, e.SendNotice) and isinstance(c.body, Beat)]
            for at in beats:
                kit.do(e.HeadNotice(Beat("epoch", at, at + ahead)))
        arrivals.append((kit.state.next_deadline() + ahead) % s.BUNCH_S)
    assert all(min(at, s.BUNCH_S - at) < 1e-6 for at in arrivals)


def test_bunched_beats_keep_their_interval():
    kit, sent = Kit().join(), []
    while len(sent) < 20:
        kit.now = kit.state.next_deadline()
        sent += [c.body.at for c in kit.do(e.Tick()) if isinstance(c, e.SendNotice) and isinstance(c.body, Beat)]
        kit.do(e.HeadNotice(Beat("epoch", sent[-1], sent[-1] + 5.0 + 0.001 * (len(sent) % 3))), 0.001)
    gaps = [later - before for before, later in itertools.pairwise(sent[1:])]
    assert max(abs(gap - 1.0) for gap in gaps) <= s.BUNCH_S / 2 + 0.01
