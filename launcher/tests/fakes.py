"""A supervisor whose children, clock and signals are played."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from text_generation_launcher import ends, supervisor
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.process import Command
from text_generation_process.log import LogLine
from text_generation_process.option import Mode

Behaviour = Callable[["FakeChild"], None]


class FakeLog:
    """Keeps what is logged: texts, and answers for programs."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.answers: list[Any] = []

    def info(self, message: str) -> None:
        self.lines.append(message)

    error = info

    def write(self, line: LogLine) -> None:
        self.lines.append(line.message)

    def answer(self, record: Any) -> None:
        self.answers.append(record)


class FakeChild:
    """A process that ends when the world says so, or by a signal."""

    def __init__(self, world: "World", command: Command) -> None:
        self.world, self.command, self.name = world, command, command.name
        self.returncode: int | None = None
        self.is_stopped = self.is_stubborn = self.is_failing = False
        self.answer: Any = None
        self.last_message = ""
        self.words: tuple[str, ...] = ()
        self.pid = -1

    @property
    def is_alive(self) -> bool:
        return self.returncode is None

    def end(self, code: int, *words: str) -> None:
        """It ends by itself."""
        if self.is_alive:
            self.returncode, self.words = code, words

    def terminate(self) -> None:
        if not self.is_alive:
            return
        self.world.trace.append(f"{self.name} got SIGTERM")
        if not (self.is_stubborn or self.is_stopped):
            self.end(0)

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    def last_words(self) -> tuple[str, ...]:
        return self.words

    def settle(self) -> None:
        pass

    drain = settle


@dataclass
class World:
    """Owns the virtual time, and what happens when. `run` is the life of one launcher."""

    folder: Path
    now: float = 0.0
    log: FakeLog = field(default_factory=FakeLog)
    trace: list[str] = field(default_factory=list)
    """Starts and signals of the children, in order."""
    children: dict[str, FakeChild] = field(default_factory=dict)
    """The latest of each name."""
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    is_healthy: bool = True
    events: list[tuple[float, Callable[[], signal.Signals | None]]] = field(default_factory=list)

    def after(self, seconds: float, happen: Callable[[], Any]) -> None:
        """Calls `happen` later; a signal that it returns reaches the launcher."""
        self.events.append((self.now + seconds, happen))
        self.events.sort(key=lambda event: event[0])

    def stop(self, seconds: float, number: signal.Signals = signal.SIGTERM) -> None:
        """The launcher gets a signal later."""
        self.after(seconds, lambda: number)

    def end_later(self, name: str, seconds: float, code: int, *words: str) -> None:
        """The child of this name ends later."""
        self.after(seconds, lambda: self.children[name].end(code, *words))

    def start(self, command: Command, on_line: Callable[[LogLine], None]) -> FakeChild:
        """In the place of `ManagedProcess`."""
        child = self.children[command.name] = FakeChild(self, command)
        self.trace.append(f"{command.name} started with {command.argv[0]}")
        listen = (lambda child: None) if command.name.startswith("the ") else self.listen
        self.behaviours.get(command.name, listen)(child)
        return child

    def listen(self, child: FakeChild) -> None:
        """A shard is ready at once."""
        (self.folder / f"shard-{child.name.removeprefix('shard ')}").touch()

    def wait(self, signals: Any, seconds: float) -> Any:
        """In the place of `signal.sigtimedwait`: until the next event at most."""
        assert self.now < 10_000, "the launcher does not end"
        if not self.events or self.events[0][0] > self.now + seconds:
            self.now += seconds
            return None
        at, happen = self.events.pop(0)
        self.now = max(self.now, at)
        number = happen()
        is_stop = isinstance(number, signal.Signals)
        return SimpleNamespace(si_signo=number if is_stop else signal.SIGCHLD)

    def run(self, mode: Mode = Mode.SERVE, num_shards: int = 1, **fields: Any) -> int:
        """The exit code of a launcher."""
        names = [f"shard {rank}" for rank in range(num_shards)]
        argv = ("{model_path}", "{master_port}")
        in_place = "the batch" if mode is Mode.BATCH else "the router"
        config = LauncherConfig(
            **{
                "download": None,
                "model_path": Path("/models/some"),
                "shards": tuple(Command(name, name, argv, {}) for name in names),
                "router": Command(in_place, in_place, argv, {}),
                "mode": mode,
                "shard_uds_path": str(self.folder / "shard"),
                "hostname": "127.0.0.1",
                "port": 0,
                "termination_timeout_s": 90.0,
            }
            | fields
        )
        return supervisor.Supervisor(config, self.log).run()  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Children that are started are played."""
    world = World(tmp_path)
    clock = SimpleNamespace(monotonic=lambda: world.now)
    monkeypatch.setattr(supervisor, "ManagedProcess", world.start)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(ends, "time", clock)
    monkeypatch.setattr(supervisor, "is_healthy", lambda *_: world.is_healthy)
    monkeypatch.setattr(supervisor, "reap_orphans", lambda children: None)
    monkeypatch.setattr(signal, "sigtimedwait", world.wait)
    return world
