"""The Cluster of a driver or worker: its start, its nodes, its events, and the agentd of a private cluster."""
