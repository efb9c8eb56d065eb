"""Sockets and event loops. No other package opens connections between processes."""
