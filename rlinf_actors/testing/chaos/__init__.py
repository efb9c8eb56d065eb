"""Random faults in a real cluster with work under way, and whether every promise was kept; see docs/reliability.md.

`python -m rlinf_actors.testing.chaos` runs it. `scene` has the processes and makes faults happen, `plan` chooses them,
`load` is a driver, `workers` are its workers, `record` is what each writes down, `invariants` and `deliveries` judge
that.
"""
