"""What every process of the server needs of its system; the standard library only."""
