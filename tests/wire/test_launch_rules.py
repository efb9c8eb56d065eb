"""Who may launch on a node, by its own rules."""

import pytest

from rlinf_actors.wire.launch_rules import Launcher, LaunchRules

A = Launcher("driver-a")
ROBOTICIST = Launcher("driver-b", ("robots",))
LOCAL = Launcher()
WORKER = Launcher("driver-a", nested=True)


@pytest.mark.parametrize(
    ("rules", "admitted", "refused"),
    [
        (LaunchRules(), [A, ROBOTICIST, LOCAL, WORKER], []),
        (LaunchRules(("driver-a",)), [A, WORKER], [ROBOTICIST, LOCAL]),
        (LaunchRules(("@robots",)), [ROBOTICIST], [A, LOCAL, Launcher("robots")]),
        (LaunchRules(("@local",)), [LOCAL], [A, ROBOTICIST, Launcher("local"), Launcher("x", ("local ",))]),
        (LaunchRules(("*",)), [A, ROBOTICIST, LOCAL], []),
        (LaunchRules(()), [], [A, ROBOTICIST, LOCAL, WORKER]),
        (LaunchRules(nested=False), [A, ROBOTICIST, LOCAL], [WORKER]),
        (LaunchRules(users=("driver-a",)), [A, WORKER], [ROBOTICIST, LOCAL]),
    ],
)
def test_rules_admit_who_is_listed(rules, admitted, refused):
    assert [one for one in admitted if rules.why_not("n", one)] == []
    assert [one for one in refused if not rules.why_not("n", one)] == []


def test_robots_are_given_to_fewer_drivers():
    rules = LaunchRules(("*",), ("@robots",))
    assert not rules.why_not("n", A)
    assert not rules.why_not("n", ROBOTICIST, robots=True)
    why = rules.why_not("n", A, robots=True)
    assert "node n does not give its robots to driver 'driver-a': robots in [admit] of its agentd.toml" in why
    assert LaunchRules(("driver-a",), ("@robots",)).why_not("n", ROBOTICIST, robots=True), "the node does not admit it"


def test_refusal_names_the_rule_and_what_to_do():
    why = LaunchRules(("driver-a", "@robots")).why_not("gpu-1", Launcher("driver-c"))
    assert (
        "gpu-1 does not admit driver 'driver-c': drivers in [admit] of its agentd.toml has 'driver-a', '@robots'" in why
    )
    assert "SIGHUP" in why
    why = LaunchRules(users=("driver-a",)).why_not("gpu-1", Launcher("driver-c"))
    assert "gpu-1 has no user for driver 'driver-c': users in [workers] of its agentd.toml has 'driver-a'" in why
    assert "nobody" in LaunchRules(()).why_not("n", A)
    assert "nested in [admit]" in LaunchRules(nested=False).why_not("n", WORKER)
    assert "(@local)" in LaunchRules(()).why_not("n", LOCAL)
