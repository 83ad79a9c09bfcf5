"""What every process of the server needs of the system; the standard library only."""
