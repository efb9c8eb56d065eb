"""RLinf's AgentRunner with an agent loop of one row a query, a tool and a reward group."""

from report import Report

report = Report()

from agent_setup import configuration, run  # noqa: E402 - the imports are a part of the report
from agent_workers import AgentLoop  # noqa: E402

report.part("imports")

if __name__ == "__main__":
    run(configuration("runner.save_interval=4"), report, AgentLoop, loops=2, judge=False, reward=True)
