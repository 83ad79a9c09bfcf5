"""`text-generation-benchmark`: how fast the shards are, without a router between, or a server."""
