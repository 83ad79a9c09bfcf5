"""What this server does to be fast, and why it does not do the rest."""

from text_generation_router.services import Services


def features(services: Services) -> dict[str, str]:
    """Each is `on` or `off`, and where there is something to say, a colon and that."""
    config, shard = services.config, services.info
    return {
        "prefix_caching": _prefix_caching(services),
        "prefill_chunking": _unless(
            config.disable_prefill_chunking, "--disable-prefill-chunking was given"
        ),
        "speculation": (
            f"on: up to {config.speculate} guessed tokens per request and step"
            if config.speculate
            else "off: start with --speculate N"
        ),
        "async_scheduling": _unless(
            not shard.spares_core,
            "the model computes on every core, and the router's work would delay it",
        ),
        "quantization": (
            f"on: {shard.quantize}" if shard.quantize else "off: start with --quantize"
        ),
        "deterministic": (
            "on"
            if shard.deterministic
            else "off: this device's operators round differently in other batches"
        ),
        "grammars": _unless(config.disable_grammar_support, "--disable-grammar-support was given"),
        "cuda_graphs": _cuda_graphs(services),
        "lora_adapters": "off: not supported yet",
    }


def _prefix_caching(services: Services) -> str:
    shard = services.info
    if services.config.disable_prefix_caching:
        return "off: --disable-prefix-caching was given"
    if shard.recompute_at is not None:
        return (
            f"on: but not for requests that can grow from at most {shard.recompute_at} tokens to "
            "more, whose KV this model computes anew on the way"
        )
    if shard.prompt_scaled_at is not None:
        return (
            f"on: but prompts of more than {shard.prompt_scaled_at} tokens share only with prompts "
            "as long, because this model stretches its context by their length"
        )
    return "on"


def _cuda_graphs(services: Services) -> str:
    shard = services.info
    if shard.records_steps:
        return "on"
    if shard.device_type == "cpu":
        return "off: the model runs on a CPU"
    return "off: --cuda-graphs 0 was given, or this model rotates by the length of a text"


def _unless(is_off: bool, reason: str) -> str:
    return f"off: {reason}" if is_off else "on"
