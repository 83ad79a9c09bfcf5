"""The HTTP server, the continuous-batching loop and all text work."""
