"""Code that travels from a driver to nodes, and environments that nodes build.

`tree` and `requirements` decide and are pure. `code_scan` reads the driver's directory. `code_store` and `environments`
keep what a node has received or built; `locks` tells which of it is in use. None of these modules opens a socket or
unpickles.
"""
