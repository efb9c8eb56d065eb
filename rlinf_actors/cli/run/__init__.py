"""`rlinf-actors run`: a cluster that begins and ends with a program."""
