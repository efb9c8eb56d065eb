"""`rlinf-actors top`: what a cluster uses, in a terminal."""
