"""Keys and members of a cluster, and the rules for which member may send which message."""
