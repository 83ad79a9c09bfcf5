"""`text-generation-benchmark`: the shards without a router, or a running server under load.

The load generator (`http`, `streams`, `load`) imports nothing of the server.
"""


class BenchmarkError(Exception):
    """The measurement is not possible; the message says why and what to do."""
