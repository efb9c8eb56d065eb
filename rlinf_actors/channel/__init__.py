"""Channels: named queues between any processes of a job."""
