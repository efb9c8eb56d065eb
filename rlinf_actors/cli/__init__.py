"""The command line `rlinf-actors`; needs the extra [cli]. One module per command."""
