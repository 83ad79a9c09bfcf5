"""`text-generation-benchmark --url`: a server loaded with streams, as its clients see it."""
