"""A small arm on a serial line, as a hardware type of rlinf-actors."""
