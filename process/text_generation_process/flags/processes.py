"""Flags of the shards: how many, where they meet, when they are replaced, their device; and of the
launcher's own process: its other modes, its log, traces, its end."""

from text_generation_process import defaults
from text_generation_process.option import (
    HTTP,
    PORT,
    ROUTER,
    SHARD,
    Child,
    Mode,
    Option,
    choice,
    not_negative,
    number,
    sizes,
    true_or_false,
    whole,
)
from text_generation_process.tracing import collector

_STEP_DEADLINE = (
    f"{defaults.LEAST_STEP_DEADLINE_S:g} (on a GPU {defaults.LEAST_STEP_DEADLINE_ON_GPU_S:g}), or "
    f"{defaults.STEP_DEADLINE_FACTOR:g} times what warm-up expects of such a step"
)
_OWN_KERNELS = "pytgi computes every model with its own kernels, and has no other implementation"

SHARDS = (
    Option(
        "num-shard",
        "processes that the model is split over; by default one for each GPU that "
        "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES names, and one on a CPU",
        whole(1),
    ),
    Option(
        "sharded",
        "true: split over all GPUs, which must be at least two; false: one shard, unless "
        "--num-shard is given",
        true_or_false,
    ),
    Option(
        "master-addr",
        f"address of this machine where the shards meet (default {defaults.MASTER_ADDR})",
    ),
    Option("master-port", "port of --master-addr; by default a free one", PORT),
    Option(
        "step-deadline",
        "seconds that a step may take, and that one shard waits for another in it, before they are "
        f"declared lost; by default {_STEP_DEADLINE}",
        number(0),
        (Child.SHARD, Child.ROUTER),
    ),
    Option(
        "restart",
        "replace shards and router that end, up to 5 times in 10 minutes; RESTART=false or "
        "--no-restart: the server ends with them",
        default="true",
        switch=True,
        modes=HTTP,
    ),
    Option(
        "no-restart",
        "end, with exit code 1, when a shard or the router ends",
        switch=True,
        has_environment=False,
        modes=HTTP,
    ),
    Option(
        "resume-streams",
        "false: streams that have begun end with an error when shards are replaced; true: they "
        "continue after a pause (default true)",
        true_or_false,
        ROUTER,
        modes=HTTP,
    ),
    Option(
        "shard-uds-path",
        "prefix of the shards' unix sockets, -<rank> is appended; by default they are in a new "
        "folder that only this user can open, in XDG_RUNTIME_DIR or TMPDIR",
    ),
    Option(
        "cuda-memory-fraction",
        "share of the GPU's memory that a shard may use",
        number(0, maximum=1),
        SHARD,
    ),
    Option(
        "cuda-graphs",
        "on a GPU, numbers of tokens, separated by commas, for which steps without prompts are "
        "recorded as CUDA graphs; 0: none; by default 1, 2, 4, 8 and every 8 up to "
        "--max-batch-size",
        sizes,
        SHARD,
    ),
    Option(
        "disable-custom-kernels",
        f"no effect: {_OWN_KERNELS}",
        switch=True,
        note=f"--disable-custom-kernels has no effect: {_OWN_KERNELS}",
    ),
    Option(
        "enable-reflection",
        "gRPC reflection on the shards' sockets, for tools like grpcurl",
        to=SHARD,
        switch=True,
    ),
    Option(
        "watermark-gamma", "share of the vocabulary that the watermark favours", number(0, 1), SHARD
    ),
    Option("watermark-delta", "added to the scores of these tokens", not_negative, SHARD),
    Option(
        "enable-prefill-logprobs",
        "no effect: always on",
        switch=True,
        note="--enable-prefill-logprobs has no effect: requests can always ask for the "
        "log-probabilities of their prompt (decoder_input_details)",
    ),
)

PROCESS = (
    Option(
        "input",
        "file with the requests, in OpenAI's batch format",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "output",
        "file for the results, one per line; an existing file is continued",
        has_environment=False,
        modes=(Mode.BATCH,),
    ),
    Option(
        "end-with-stdin",
        "stop when standard input ends, for example because the parent process is gone",
        switch=True,
        has_environment=False,
        modes=(Mode.SHARDS,),
    ),
    Option(
        "json-output",
        "log one JSON object per line",
        switch=True,
    ),
    Option(
        "otlp-endpoint",
        "gRPC address of an OpenTelemetry collector that gets the traces of requests, like "
        "http://127.0.0.1:4317",
        collector,
        (Child.SHARD, Child.ROUTER),
        modes=HTTP,
    ),
    Option(
        "otlp-service-name",
        "name of the router and its shards in traces, by default "
        f"{defaults.ROUTER_SERVICE_NAME} and {defaults.SHARD_SERVICE_NAME}",
        to=(Child.SHARD, Child.ROUTER),
        modes=HTTP,
    ),
    Option(
        "usage-stats",
        "no effect: pytgi never sends usage statistics",
        choice("on", "off", "no-stack"),
        note="--usage-stats has no effect: pytgi never sends usage statistics",
        plain=("off",),
    ),
    Option(
        "env",
        "print the runtime environment, then start",
        switch=True,
        has_environment=False,
        short="-e",
    ),
    Option(
        "graceful-termination-timeout",
        "seconds that running requests have to end when the server stops",
        not_negative,
        ROUTER,
        default=f"{defaults.TERMINATION_TIMEOUT_S:g}",
        short="-g",
        modes=HTTP,
    ),
)
