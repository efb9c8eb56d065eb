"""cgroups: the kernel's limits on a worker and on all that it starts."""
