"""Flags of the limits: of one request, of the queue, of a batch."""

from text_generation_process import defaults

from text_generation_launcher.option import HTTP, ROUTER, WITH_ROUTER, Option
from text_generation_launcher.values import choice, not_negative, number, true_or_false, whole

LIMITS = (
    Option("validation-workers", "tokenizer threads of the router", whole(1), ROUTER),
    Option(
        "max-concurrent-requests", "maximum concurrent requests; more get 429", whole(1), ROUTER
    ),
    Option(
        "request-timeout",
        "maximum seconds from a request's arrival to the end of its answer; then it gets 504",
        number(0),
        ROUTER,
        modes=HTTP,
    ),
    Option(
        "max-queue-wait",
        "maximum seconds that a request waits in the queue; then it gets 503",
        number(0),
        ROUTER,
        modes=HTTP,
    ),
    Option("max-best-of", "maximum best_of of a request", whole(1), ROUTER),
    Option("max-stop-sequences", "maximum stop sequences of a request", whole(0), ROUTER),
    Option("max-top-n-tokens", "maximum top_n_tokens of a request", whole(0), ROUTER),
    Option("max-input-tokens", "maximum tokens of a prompt", whole(1), ROUTER),
    Option("max-input-length", "the old name of --max-input-tokens", whole(1), modes=WITH_ROUTER),
    Option("max-total-tokens", "maximum tokens of a prompt and its answer", whole(1), ROUTER),
    Option(
        "waiting-served-ratio",
        "ratio of waiting to running requests above which waiting ones are admitted; without "
        "prefill chunking only",
        not_negative,
        ROUTER,
        default=str(defaults.LAUNCHER_WAITING_SERVED_RATIO),
    ),
    Option("max-batch-prefill-tokens", "maximum prompt tokens in one step", whole(1), ROUTER),
    Option(
        "disable-prefix-caching",
        "compute every prompt from its first token; PREFIX_CACHING=false does the same",
        true_or_false,
        ROUTER,
        switch=True,
    ),
    Option(
        "disable-prefill-chunking",
        "compute each prompt in one step if it fits; PREFILL_CHUNKING=0 does the same",
        true_or_false,
        ROUTER,
        switch=True,
    ),
    Option(
        "inter-token-latency-target-ms",
        "target duration of a step that carries parts of prompts, in milliseconds",
        whole(1),
        ROUTER,
    ),
    Option("max-batch-total-tokens", "maximum tokens of all running requests", whole(1), ROUTER),
    Option(
        "max-waiting-tokens",
        "maximum steps that a waiting request waits; without prefill chunking only",
        whole(0),
        ROUTER,
    ),
    Option("max-batch-size", "maximum running requests", whole(1), ROUTER),
    Option(
        "max-client-batch-size",
        "TGI's maximum of prompts in one request: /info reports it, no request is limited by it",
        whole(1),
        ROUTER,
    ),
    Option("payload-limit", "maximum bytes of a request body", whole(1), ROUTER),
    Option("disable-grammar-support", "refuse grammars", true_or_false, ROUTER, switch=True),
    Option(
        "pooling",
        "which hidden state /v1/embeddings answers: of the last token, or the mean; by default as "
        "the model's 1_Pooling/config.json says, else last",
        choice("last", "mean"),
        ROUTER,
    ),
    Option(
        "reranker",
        "serve /score and /rerank in the form of Qwen3-Reranker; by default if the model is one",
        true_or_false,
        ROUTER,
        switch=True,
        modes=HTTP,
    ),
)
