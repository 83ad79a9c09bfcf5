"""Flags of the shards: how many, where they meet, when they are replaced, their device."""

from text_generation_process import defaults

from text_generation_launcher.option import HTTP, ROUTER, SHARD, Child, Option
from text_generation_launcher.values import (
    PORT,
    not_negative,
    number,
    sizes,
    true_or_false,
    whole,
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
        f"declared lost; by default {defaults.STEP_DEADLINE}",
        number(0),
        (Child.SHARD, Child.ROUTER),
    ),
    Option(
        "restart",
        "replace shards and router that end, up to 5 times in 10 minutes; RESTART=false or "
        "--no-restart: the server ends with them",
        true_or_false,
        default="true",
        switch=True,
        modes=HTTP,
    ),
    Option(
        "no-restart",
        "end, with exit code 1, when a shard or the router ends",
        true_or_false,
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
        true_or_false,
        switch=True,
        note=f"--disable-custom-kernels has no effect: {_OWN_KERNELS}",
    ),
    Option(
        "enable-reflection",
        "gRPC reflection on the shards' sockets, for tools like grpcurl",
        true_or_false,
        SHARD,
        switch=True,
    ),
    Option(
        "watermark-gamma", "share of the vocabulary that the watermark favours", number(0, 1), SHARD
    ),
    Option("watermark-delta", "added to the scores of these tokens", not_negative, SHARD),
    Option(
        "enable-prefill-logprobs",
        "no effect: always on",
        true_or_false,
        switch=True,
        note="--enable-prefill-logprobs has no effect: requests can always ask for the "
        "log-probabilities of their prompt (decoder_input_details)",
    ),
)
