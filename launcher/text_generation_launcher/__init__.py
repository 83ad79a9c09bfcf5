"""Starts and supervises the shards and the router."""
