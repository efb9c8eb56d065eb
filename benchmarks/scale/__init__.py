"""Simulate a large cluster on one machine: ``python -m benchmarks scale``.

The head is a real process. Each agent is a real session of agentd with its own connection to the head, but its workers
exist in messages only, so thousands of agents and workers fit on one machine. Every message is a real one, on a real
socket.

| module | process |
|---|---|
| `cluster` | the command itself: starts the others, gives orders and measures |
| `agents` | agents, and one socket that answers for their workers; `agent_processes` starts as many as needed |
| `observer` | a client of the head that records when each notice arrives |
| `driver` | a script with a Cluster, which launches on the simulated nodes |

`placement` measures placement and specs alone, `tables` the tables of the head alone; both in this process.
"""
