"""The Cluster of a driver or worker: its start, its nodes, and the embedded agentd of a private cluster."""
