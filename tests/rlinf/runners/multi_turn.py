"""RLinf's AgentRunner with a multi-turn agent loop: a row a turn, a judge model, metrics over all ranks."""

from report import Report

report = Report()

from agent_setup import configuration, run  # noqa: E402 - the imports are a part of the report
from agent_workers import MultiTurnLoop  # noqa: E402

report.part("imports")

if __name__ == "__main__":
    dynamic = configuration("agentloop.is_dynamic_rollout_batch=true")
    run(dynamic, report, MultiTurnLoop, loops=2, judge=True, reward=False)
