"""The built-in vendors of accelerators: one module each, with a function ``find(environ) -> FoundAccelerators``.

The probe runs ``find`` in a child process, since a vendor's library may hang or crash. `catalog` recognizes from files
which vendors are present. `machine` gives the modules access to files and to the vendors' tools.
"""
