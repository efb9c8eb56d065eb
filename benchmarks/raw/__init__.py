"""What the machine can do, with as little Python in the way as can be."""
