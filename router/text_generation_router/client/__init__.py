"""The gRPC client of the shards."""
