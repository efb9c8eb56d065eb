"""Traces: events of every process in a ring in shared memory, and the Chrome trace that is made of them."""
