"""Flags of the launcher's process: its other modes, its log, traces, its end."""

from text_generation_process import defaults
from text_generation_process.tracing import collector

from text_generation_launcher.option import HTTP, ROUTER, Child, Mode, Option
from text_generation_launcher.values import choice, not_negative, true_or_false

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
        true_or_false,
        switch=True,
        has_environment=False,
        modes=(Mode.SHARDS,),
    ),
    Option(
        "json-output",
        "log one JSON object per line",
        true_or_false,
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
