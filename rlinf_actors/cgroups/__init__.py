"""The kernel's limits on a worker and on all processes that it starts."""
