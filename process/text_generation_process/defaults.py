"""Each default and measure that more than one package needs. What one package needs is there, and
other defaults of flags are in `flags.py`. `integration_tests/test_defaults.py` finds a second
place."""

HOSTNAME = "0.0.0.0"
PORT = 3000
TERMINATION_TIMEOUT_S = 90.0
"""--graceful-termination-timeout."""
LAUNCHER_WAITING_SERVED_RATIO = 0.3
"""The launcher passes it to the router, whose own default differs. Both are TGI's."""
LOGGER_LEVEL = "INFO"

# Shards
SOCKET_NAME = "text-generation-server"
"""Prefix of the sockets' names, followed by `-` and the rank, in a folder of the launcher."""
MASTER_ADDR = "localhost"
ROPE_FACTOR = 1.0
STARTING_DEADLINE_S = 20.0
"""How long a shard waits for another, and the router for a shard, until warm-up is over."""
LEAST_STEP_DEADLINE_S = 5.0
LEAST_STEP_DEADLINE_ON_GPU_S = 20.0
"""Longer, because compiling a new kernel or recording a graph takes seconds."""
STEP_DEADLINE_FACTOR = 20.0
"""A step may take this many times what warm-up expects of it, and not less than the two above."""

# What warm-up measures
WARMUP_ROWS = 32
"""Rows of the step that is measured, or as many as there are."""
CONTEXT_UNIT = 1024
"""`prefill_context_ns` is the cost per prompt token of this many preceding tokens."""
