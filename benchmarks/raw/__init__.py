"""The limits of the machine, measured with as little Python as possible."""
