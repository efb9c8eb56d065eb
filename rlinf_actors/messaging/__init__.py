"""Messages between workers: send, recv, broadcast. Bytes go inline over ZeroMQ, bounded by credits."""
