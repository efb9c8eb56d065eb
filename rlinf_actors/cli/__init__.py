"""The command line `rlinf-actors`. One module per command. The extra [cli] adds rich and psutil."""
