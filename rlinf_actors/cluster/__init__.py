"""What a driver holds: the cluster, embedded or reached through its head."""
