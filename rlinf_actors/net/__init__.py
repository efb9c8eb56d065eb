"""Sockets and loops: the only package that moves bytes between processes."""
