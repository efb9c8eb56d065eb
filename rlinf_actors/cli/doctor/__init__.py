"""`rlinf-actors doctor`: facts, checks and their report."""
