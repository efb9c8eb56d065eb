"""Facts about a machine and its network from which `rlinf-actors doctor` finds problems."""
