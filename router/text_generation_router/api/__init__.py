"""HTTP routes and their bodies."""
