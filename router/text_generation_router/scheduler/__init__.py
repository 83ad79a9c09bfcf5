"""Pure scheduling: no HTTP, no gRPC."""
