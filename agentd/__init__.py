"""The node daemon: registers with the head, reports hardware, starts and watches workers."""
