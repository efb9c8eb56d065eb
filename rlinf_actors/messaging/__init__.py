"""Messages between workers: send, recv and broadcast. The sender limits the bytes in flight to each receiver."""
