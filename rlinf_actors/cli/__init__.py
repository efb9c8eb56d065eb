"""The command line `rlinf-actors`. A command is a module, or a package. The extra [cli] adds rich and psutil."""
