"""The launcher's configuration: what is started, with which arguments and environment."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from text_generation_process import defaults
from text_generation_process.flags import contradictions
from text_generation_process.log import LEVELS, normalize_level
from text_generation_process.option import Child, InvalidOptions, Mode, Values

from text_generation_launcher import options
from text_generation_launcher.process import Command

EMBEDDED_MODEL_ID = "pytgi/embedded"
EMBEDDED_MODEL_PATH = Path(__file__).parent / "embedded_model"
MODEL_PATH = "{model_path}"
"""Placeholder in a command for the model's directory, which the download returns."""
SOCKETS = "{shard_uds_path}"
"""Placeholder in a command for the prefix of the shards' sockets."""
RENDEZVOUS_PORT = "{master_port}"
"""Placeholder in a command for the port where several shards meet."""
_PYTHON_LEVELS = {"DEBUG": "DEBUG", "INFO": "INFO", "WARN": "WARNING", "ERROR": "ERROR"}
_SECRETS = ("API_KEY", "NGROK_AUTHTOKEN", "HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Values of NVIDIA_VISIBLE_DEVICES that list no GPU, although a container may have some.
_NO_LIST = ("", "all", "void", "none")
_BY_NAME = ("GPU-", "MIG-")
_DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class LauncherConfig:
    """The input of the supervisor, which knows processes and not models."""

    download: Command | None
    """Prints the model's directory; None if `model_path` is known."""
    model_path: Path | None
    shards: tuple[Command, ...]
    """One per rank, started together."""
    router: Command | None
    """None in the mode `shards`; in the mode `batch` the process that answers the file."""
    mode: Mode = Mode.SERVE
    model_id: str = EMBEDDED_MODEL_ID
    """The requested name."""
    shard_uds_path: str | None = None
    """Prefix of the sockets: rank 0 listens on this + `-0` once it is ready. None:
    `text-generation-server` in a private folder of this launcher."""
    socket_places: tuple[Path, ...] = (Path("/tmp"),)
    """For the private folder, in order."""
    master_addr: str = defaults.MASTER_ADDR
    """Where several shards meet."""
    master_port: int | None = None
    """None: any free port."""
    notes: tuple[str, ...] = ()
    """Sentences about given options that have no effect here."""
    hostname: str = defaults.HOSTNAME
    port: int = defaults.PORT
    prometheus_port: int | None = None
    has_api_key: bool = False
    has_tls: bool = False
    """Whether the router speaks https instead of http."""
    restarts: bool = False
    """Whether shards and router that end while they serve are replaced."""
    termination_timeout_s: float = defaults.TERMINATION_TIMEOUT_S
    """How long the router, then the shards, may take to end."""


def console_script(name: str, module: str) -> tuple[str, ...]:
    """The command of a program of this installation, also if PATH does not have it."""
    script = Path(sys.executable).with_name(name)
    if script.is_file():
        return (sys.executable, str(script))
    return (sys.executable, "-m", module)


def log_level(environment: Mapping[str, str]) -> str:
    """LOG_LEVEL as one of LEVELS; raises InvalidOptions."""
    given = environment.get("LOG_LEVEL") or "info"
    level = normalize_level(given)
    if level is None:
        expected = ", ".join(name.lower() for name in LEVELS)
        raise InvalidOptions(f"LOG_LEVEL={given!r} is not a level: set it to one of {expected}")
    return level


def create_config(
    values: Values,
    environment: Mapping[str, str],
    mode: Mode = Mode.SERVE,
) -> LauncherConfig:
    """Raises InvalidOptions for options that are not supported or contradict each other."""
    options.refuse(values)
    values = {**_switched_off(environment), **values}
    if mode is Mode.SERVE:
        values = {**values, "port": values.get("aip-http-port", values["port"])}
    if "no-restart" in values:
        values = {name: value for name, value in values.items() if name != "restart"}
    for sentence in _contradictions(values, mode):
        raise InvalidOptions(sentence)
    model_id = _model_id(values)
    num_shards = find_num_shards(
        sharded=values["sharded"] == "true" if "sharded" in values else None,
        num_shard=_number(values, "num-shard"),
        device=values.get("device"),
        environment=environment,
        count_gpus=count_gpus,
    )
    values = _completed(values)
    commands = _Commands(values, environment, model_id or EMBEDDED_MODEL_ID, num_shards)
    places = (environment.get("XDG_RUNTIME_DIR"), environment.get("TMPDIR"), "/tmp", "/var/tmp")
    return LauncherConfig(
        download=commands.download() if model_id else None,
        model_path=None if model_id else EMBEDDED_MODEL_PATH,
        shards=tuple(commands.shard(rank) for rank in range(num_shards)),
        router=None if mode is Mode.SHARDS else commands.router(mode),
        mode=mode,
        model_id=commands.model_id,
        shard_uds_path=values.get("shard-uds-path"),
        socket_places=tuple(Path(place) for place in places if place),
        master_addr=values.get("master-addr", defaults.MASTER_ADDR),
        master_port=_number(values, "master-port"),
        notes=_without_effect(mode, values, num_shards, environment),
        hostname=values.get("hostname", defaults.HOSTNAME),
        port=_number(values, "port") or defaults.PORT,
        prometheus_port=_number(values, "prometheus-port"),
        has_api_key="api-key" in values or "api-key-file" in values,
        has_tls="ssl-certfile" in values,
        restarts="restart" in values,
        termination_timeout_s=float(
            values.get("graceful-termination-timeout", defaults.TERMINATION_TIMEOUT_S)
        ),
    )


def _number(values: Values, name: str) -> int | None:
    return int(values[name]) if name in values else None


def _without_effect(
    mode: Mode, values: Values, num_shards: int, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Notes about flags that have no effect with one shard or without another flag, and about
    ATTENTION, which chooses one of TGI's kernels."""
    names = ("master-addr", "master-port") if num_shards == 1 else ()
    notes = [f"--{name} has no effect with one shard" for name in names if name in values]
    if "otlp-service-name" in values and "otlp-endpoint" not in values:
        notes.append("--otlp-service-name has no effect without --otlp-endpoint")
    if attention := environment.get("ATTENTION"):
        notes.append(f"ATTENTION={attention} has no effect: pytgi has its own kernels")
    if mode is Mode.SERVE and "restart" not in values and "resume-streams" in values:
        notes.append(
            "--resume-streams has no effect with --no-restart: the server ends with its shards"
        )
    return tuple(notes)


def _contradictions(values: Values, mode: Mode) -> Iterator[str]:
    """The sentences about options that are wrong together, or about files, before a model is
    loaded."""
    if mode is Mode.BATCH:
        yield from _wrong_files(values)
    if "max-input-tokens" in values and "max-input-length" in values:
        yield "--max-input-tokens and --max-input-length are the same limit: give only the first"
    whole = _completed(values)
    yield from contradictions(whole.get)
    for name in ("port", "prometheus-port"):
        if "master-port" in values and values.get(name) == values["master-port"]:
            yield (
                f"--master-port and --{name} are both {values[name]}: leave out --master-port, "
                "and the shards meet on a free port"
            )
    for name in ("ssl-certfile", "ssl-keyfile"):
        path = values.get(name)
        if path and not (Path(path).is_file() and os.access(path, os.R_OK)):
            yield (
                f"--{name} {path} is not a file that can be read: give a PEM file that this user "
                "can read"
            )
    if "revision" in values and "model-id" not in values:
        yield (
            "--revision is given without --model-id, and the embedded model has no revisions: add "
            "--model-id or leave out --revision"
        )


def _wrong_files(values: Values) -> Iterator[str]:
    """The same about the files of a batch."""
    for name in ("input", "output"):
        if name not in values:
            files = "--input requests.jsonl --output results.jsonl"
            yield f"--{name} is missing: a batch takes {files}"
    source, target = Path(values["input"]), Path(values["output"])
    if not source.is_file():
        yield f"--input {source} is not a file: give the file with the requests"
    if not target.parent.is_dir():
        yield f"--output {target} is in a directory that does not exist: create it"
    if target.is_dir():
        yield f"--output {target} is a directory: give the name of a file"
    if target.exists() and target.samefile(source):
        yield f"--output {target} is the --input: give the results another file"


def _switched_off(environment: Mapping[str, str]) -> Values:
    """The flags for what TGI's variables turn off. Both are on by default, as in TGI."""
    variables = {
        "PREFIX_CACHING": "disable-prefix-caching",
        "USE_PREFIX_CACHING": "disable-prefix-caching",
        "PREFILL_CHUNKING": "disable-prefill-chunking",
    }
    switched_off = {}
    for variable, name in variables.items():
        given = environment.get(variable, "").lower()
        if given not in ("", "true", "1", "false", "0"):
            raise InvalidOptions(
                f"{variable}={given} is neither on nor off: set it to true or false"
            )
        if given in ("false", "0"):
            switched_off[name] = "true"
    return switched_off


def _completed(values: Values) -> Values:
    """The options, with those that follow from others."""
    if "rope-scaling" in values or "rope-factor" in values:
        rope = {"rope-scaling": "linear", "rope-factor": str(defaults.ROPE_FACTOR)}
        values = {**rope, **values}
    if "max-input-length" in values:
        values = {**values, "max-input-tokens": values["max-input-length"]}
    return values


def _model_id(values: Values) -> str:
    """The requested directory or hub id; empty for the embedded model."""
    if "model-id" not in values:
        return ""
    given = values["model-id"]
    path = Path(given).expanduser()
    if path.is_dir():
        return str(path)
    if given.startswith(("/", "./", "../", "~")) or given.count("/") > 1 or given.endswith("/"):
        state = "is a file" if path.is_file() else "does not exist"
        raise InvalidOptions(
            f"--model-id {given} {state}: give a directory that holds config.json and the weights, "
            "or a hub id like Qwen/Qwen2.5-0.5B-Instruct"
        )
    return given


def find_num_shards(
    sharded: bool | None,
    num_shard: int | None,
    device: str | None,
    environment: Mapping[str, str],
    count_gpus: Callable[[], int],
) -> int:
    """At least 1. Raises InvalidOptions.

    None means "not given". `count_gpus` returns the number of GPUs of this machine. It is called
    only if the result matters, because it may take a second. On a CPU nothing is counted.
    """
    if num_shard is not None:
        if sharded and num_shard <= 1:
            raise InvalidOptions(
                f"--sharded true and --num-shard {num_shard} contradict each other: give "
                "--num-shard 2 or more, or leave out --sharded"
            )
        return num_shard
    if sharded is False:
        return 1
    named = None if device == "cpu" else _num_named(environment, count_gpus)
    if not sharded:
        # The variable may be set where there is no GPU, and then the shard computes on the CPU.
        is_split = (named or 0) > 1 and (device == "cuda" or count_gpus() > 0)
        return named if named and is_split else 1
    present = 0 if device == "cpu" else count_gpus()
    if device != "cuda" and present == 0:
        raise InvalidOptions(
            "--sharded true needs --num-shard on a CPU, where there are no GPUs to count: add "
            "--num-shard 2 or more"
        )
    num = present if named is None else named
    if num <= 1:
        raise InvalidOptions(
            f"--sharded true needs more than one GPU, and {num} can be seen: make more visible "
            "(CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES), give --num-shard, or leave out "
            "--sharded"
        )
    return num


def _num_named(environment: Mapping[str, str], count_gpus: Callable[[], int]) -> int | None:
    """The number of GPUs in the environment's variables; None without these variables."""
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        # CUDA stops at the first name that is not a GPU: `-1` hides all names after it.
        names = [name.strip() for name in chosen.split(",")]
        return len([*takewhile(lambda name: name.isdigit() or name.startswith(_BY_NAME), names)])
    if (chosen := environment.get("NVIDIA_VISIBLE_DEVICES")) is not None:
        if chosen.strip().lower() in _NO_LIST:
            return count_gpus()
        return sum(bool(name.strip()) for name in chosen.split(","))
    return None


def count_gpus(command: str = "nvidia-smi", devices: Path = _DEVICES) -> int:
    """The number of NVIDIA GPUs that nvidia-smi lists; if it does not run, the driver's device
    files."""
    try:
        listed = subprocess.run(
            [command, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return len(list(devices.glob("nvidia[0-9]*")))
    return sum(bool(line.strip()) for line in listed.stdout.splitlines())


@dataclass(frozen=True, slots=True)
class _Commands:
    """Makes the commands of the children."""

    values: Values
    environment: Mapping[str, str]
    model_id: str
    num_shards: int

    def _flags(self, child: Child) -> tuple[str, ...]:
        level = _PYTHON_LEVELS[log_level(self.environment)]
        logging = ("--logger-level", level, "--json-output")
        return (*options.forward(self.values, child), *logging)

    @property
    def _inherited(self) -> dict[str, str]:
        """The environment of every child, without configuration and secrets."""
        hidden = (*_SECRETS, "LOG_LEVEL")
        kept = {name: value for name, value in self.environment.items() if name not in hidden}
        return kept | {"PYTHONUNBUFFERED": "1"}

    def download(self) -> Command:
        """The download of the model."""
        tokens = ("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        given = [self.environment[name] for name in tokens if self.environment.get(name)]
        hub = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        server = console_script("text-generation-server", "text_generation_shard.cli")
        return Command(
            name="the download",
            target="text_generation_shard",
            argv=(*server, "download-weights", self.model_id, *self._flags(Child.DOWNLOAD)),
            environment=self._inherited | hub | ({"HF_TOKEN": given[0]} if given else {}),
        )

    def shard(self, rank: int) -> Command:
        """One shard."""
        address = self.values.get("master-addr", defaults.MASTER_ADDR)
        rendezvous = (f"--master-addr={address}", f"--master-port={RENDEZVOUS_PORT}")
        return Command(
            name=f"shard {rank}",
            target="text_generation_shard",
            argv=(
                *console_script("text-generation-server", "text_generation_shard.cli"),
                "serve",
                MODEL_PATH,
                f"--uds-path={SOCKETS}",
                f"--rank={rank}",
                f"--world-size={self.num_shards}",
                *(rendezvous if self.num_shards > 1 else ()),
                *self._flags(Child.SHARD),
            ),
            # Weights and activations on huge pages, so that a step waits less for address
            # translation. glibc reads the variable when the process starts.
            environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **self._inherited},
            rank=rank if self.num_shards > 1 else None,
        )

    def router(self, mode: Mode) -> Command:
        """The router, or in the mode `batch` the process in its place."""
        argv = (
            f"--master-shard-uds-path={SOCKETS}-0",
            f"--tokenizer-name={MODEL_PATH}",
            f"--model-id={self.model_id}",
            *self._flags(Child.ROUTER),
        )
        target = "text_generation_router"
        if mode is Mode.BATCH:
            files = [f"--{name}={self.values[name]}" for name in ("input", "output")]
            batch = (sys.executable, "-m", "text_generation_router.offline.batch")
            return Command(
                "the batch", target, (*batch, *files, *argv), self._inherited, draws=True
            )
        router = console_script("text-generation-router", "text_generation_router.cli")
        secrets = options.forward_secrets(self.values, Child.ROUTER)
        restart = ("--restart",) if "restart" in self.values else ()
        argv = (*router, "--await-shards", *restart, *argv)
        return Command("the router", target, argv, self._inherited | secrets)
