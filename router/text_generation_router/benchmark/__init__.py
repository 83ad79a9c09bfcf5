"""`text-generation-benchmark`: measures the shards without a router, or a running server."""
