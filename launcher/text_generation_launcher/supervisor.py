"""What the launcher does, from the first check to the last child's end.

    check -> download -> shards and router -> ready -> watch -> shut down

In the mode `shards` nothing follows the shards, in the mode `batch` the file's requests do, and the
end of those is the launcher's.

Every wait goes through `Supervisor._pause`, which ends it early: by StopRequested when a signal
asks the launcher to stop, by ChildDied when a child that should run has ended.
"""

import shlex
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from text_generation_launcher.address import (
    SOCKET_NAME,
    AddressError,
    MeetingPort,
    SocketClaim,
    claim_port,
    private_folder,
)
from text_generation_launcher.config import MEETING_PORT, MODEL_PATH, SOCKETS, LauncherConfig
from text_generation_launcher.failures import (
    End,
    Kind,
    describe_end,
    describe_how,
    first_failure,
    kind_of,
    may_follow_another,
)
from text_generation_launcher.log import Log
from text_generation_launcher.option import Mode
from text_generation_launcher.private_folder import PrivateFolder
from text_generation_launcher.process import (
    STOP_SIGNALS,
    Command,
    ManagedProcess,
    ProcessError,
    reap_orphans,
)

if TYPE_CHECKING:
    from http.client import HTTPConnection

STARTUP_POLL_S = 0.02
WATCH_POLL_S = 1.0
"""Only a safety net: a child's end and a signal are noticed at once."""
WAITING_NOTICE_S = 5.0
DOWNLOAD_TERMINATION_S = 10.0
"""Nobody waits for what a download, or a batch, does: both go on where they stopped."""
FAILURE_TERMINATION_S = 10.0
"""After a failure running requests can't end well, so nobody waits long for them."""
SHARD_FAILURE_TERMINATION_S = 2.0
"""Then shards may wait for one that is gone, or be stopped and see no SIGTERM."""
CULPRIT_S = 0.5
"""How long after a child's end that of another one may be noticed which is its cause."""
PROBE_TIMEOUT_S = 2.0


class StopRequested(Exception):
    """The signal `number` asked the launcher to stop."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"received {number.name}")
        self.number = number


class ChildDied(Exception):
    """A child that should run has ended; says which, how, and its last words."""

    def __init__(self, end: End, was_ready: bool = False, cause: str = "") -> None:
        super().__init__(describe_end(end, was_ready) + cause)
        self.how = describe_how(end, was_ready) + cause
        """The same without the words."""


class Supervisor:
    """Owns the children. Used once, from the main thread, after `block_signals()`."""

    def __init__(self, config: LauncherConfig, log: Log) -> None:
        self._config = config
        self._log = log
        self._started_at = time.monotonic()
        self._download: ManagedProcess | None = None
        self._shards: list[ManagedProcess] = []
        self._router: ManagedProcess | None = None
        self._batch: ManagedProcess | None = None
        self._claim: SocketClaim | None = None
        self._meeting: MeetingPort | None = None
        self._folder: PrivateFolder | None = None
        self._ports: list[socket.socket] = []
        self._is_ready = False
        # nohup asks for a server that outlives its terminal
        ignored = {s for s in STOP_SIGNALS if signal.getsignal(s) == signal.SIG_IGN}
        self._stop_signals = STOP_SIGNALS - (ignored & {signal.SIGHUP})

    def run(self) -> int:
        """Serves until a signal or a failure, or answers a batch; returns the exit code. No child
        outlives it."""
        try:
            return self._run()
        finally:
            for child in self._children():
                child.kill()
            for port in self._ports:
                port.close()
            if self._meeting:
                self._meeting.close()
            if self._claim:
                self._claim.close()
            if self._folder:
                self._folder.close()

    def _run(self) -> int:
        try:
            self._check_addresses()
            model_path = self._find_model()
            self._start_shards(model_path)
            if self._config.mode is Mode.SERVE:
                self._start_router(model_path)
            self._wait_for_shards()
            if self._config.mode is Mode.BATCH:
                return self._answer_batch(model_path)
            if self._config.mode is Mode.SHARDS:
                self._announce_shards(model_path)
            else:
                self._wait_for_router()
                self._announce()
            while True:
                self._pause(WATCH_POLL_S)
        except StopRequested as request:
            self._log.info(f"{request}: stopping, a second signal ends everything at once")
            is_orderly = self._shut_down(self._config.termination_timeout_s)
            if self._config.mode is Mode.BATCH:
                return 128 + request.number  # a batch that was interrupted has not succeeded
            return 0 if is_orderly else 1
        except (AddressError, ProcessError) as error:
            self._log.error(str(error))
            self._shut_down(FAILURE_TERMINATION_S, SHARD_FAILURE_TERMINATION_S)
            return 1
        except ChildDied as error:
            self._log.info(f"{error.how}: stopping the others")
            self._shut_down(FAILURE_TERMINATION_S, SHARD_FAILURE_TERMINATION_S)
            # Behind what the others said while they ended: the last line tells why all did.
            self._log.error(str(error))
            return 1

    def _check_addresses(self) -> None:
        config = self._config
        if config.mode is Mode.SERVE:
            self._ports.append(claim_port(config.hostname, config.port, "--port"))
        if config.prometheus_port is not None:
            flag = "--prometheus-port"
            self._ports.append(claim_port(config.hostname, config.prometheus_port, flag))
        if len(config.shards) > 1:
            self._meeting = MeetingPort(config.master_addr, config.master_port)
        self._claim = self._claim_sockets()

    def _claim_sockets(self) -> SocketClaim:
        config = self._config
        if config.shard_uds_path is not None:
            return SocketClaim(config.shard_uds_path, len(config.shards))
        num_shards = len(config.shards)
        self._folder = private_folder(config.runtime_folder, config.temporary_folders, num_shards)
        return SocketClaim(str(self._folder.path / SOCKET_NAME), num_shards)

    def _find_model(self) -> Path:
        """The model's directory; for a hub model this is where it is downloaded."""
        if self._config.model_path is not None:
            return self._config.model_path
        assert self._config.download is not None
        self._download = download = ManagedProcess(self._config.download, self._log.write)
        while download.is_alive:
            self._pause(STARTUP_POLL_S)
        download.drain()
        if download.returncode != 0:
            raise ChildDied(_end_of(download))
        download.settle()
        path = (download.answer or {}).get("model_path")
        if not isinstance(path, str):
            raise ProcessError(
                "the download ended without the model's directory as its last line: "
                "check that the installed packages are of one version"
            )
        self._download = None
        return Path(path)

    def _start_shards(self, model_path: Path) -> None:
        if len(self._config.shards) > 1:
            self._log.info(f"Splitting the model over {len(self._config.shards)} shards")
        for command in self._config.shards:
            self._shards.append(self._start(command, model_path))

    def _wait_for_shards(self) -> None:
        assert self._claim is not None
        pairs = zip(self._shards, self._claim.paths, strict=True)
        self._wait_for({shard: Path(path).exists for shard, path in pairs})

    def _announce_shards(self, model_path: Path) -> None:
        assert self._claim is not None
        self._is_ready = True
        socket_path = self._claim.paths[0]
        elapsed_s = time.monotonic() - self._started_at
        self._log.info(
            f"Ready on unix:{socket_path} after {elapsed_s:.1f} s - try: "
            + shlex.join(["text-generation-benchmark", "--master-shard-uds-path", socket_path])
        )
        self._log.answer(
            {
                "model_id": self._config.model_id,
                "model_path": str(model_path),
                "master_shard_uds_path": socket_path,
            }
        )

    def _answer_batch(self, model_path: Path) -> int:
        """Returns what the batch exits with, once it and the shards have ended."""
        assert self._config.router is not None
        self._is_ready = True
        self._batch = batch = self._start(self._config.router, model_path)
        batch.settle()
        while batch.is_alive:
            self._pause(WATCH_POLL_S)
        batch.drain()
        code = batch.returncode or 0
        if code < 0:
            raise ChildDied(_end_of(batch))
        if code:
            self._pause(CULPRIT_S)  # it may have failed because a shard has
        self._shut_down(self._config.termination_timeout_s)
        return code

    def _start_router(self, model_path: Path) -> None:
        """At once, for it has half a second of work before it needs the shards."""
        assert self._config.router is not None
        self._router = self._start(self._config.router, model_path)

    def _wait_for_router(self) -> None:
        assert self._router is not None
        self._wait_for({self._router: self._is_healthy})

    def _start(self, command: Command, model_path: Path) -> ManagedProcess:
        assert self._claim is not None
        known = {MODEL_PATH: str(model_path), SOCKETS: self._claim.prefix}
        if self._meeting:
            known[MEETING_PORT] = str(self._meeting.number)
        argv = command.argv
        for name, value in known.items():
            argv = tuple(part.replace(name, value) for part in argv)
        self._log.debug(f"starting {command.name}: {argv[:3]}")
        return ManagedProcess(replace(command, argv=argv), self._log.write)

    def _wait_for(self, waiting: dict[ManagedProcess, Callable[[], bool]]) -> None:
        """Returns when all of the children are ready; says what they are doing as long as they
        aren't."""
        notice_at = time.monotonic() + WAITING_NOTICE_S
        while True:
            for child in [child for child, is_ready in waiting.items() if is_ready()]:
                child.settle()
                del waiting[child]
            if not waiting:
                return
            self._pause(STARTUP_POLL_S)
            if time.monotonic() >= notice_at:
                said = [(child.name, child.last_message) for child in waiting]
                self._log.info(f"Waiting for {describe_waiting(said)}")
                notice_at += WAITING_NOTICE_S

    def _is_healthy(self) -> bool:
        # imported here because it takes as long as all the rest, and the children load meanwhile
        from http.client import HTTPException

        host, port = reachable_host(self._config.hostname), self._config.port
        connection = connection_to(host, port, self._config.has_tls, PROBE_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False  # it doesn't listen yet, or not as HTTP
        finally:
            connection.close()

    def _announce(self) -> None:
        self._is_ready = True
        host = reachable_host(self._config.hostname)
        scheme = "https" if self._config.has_tls else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._config.port}"
        # The certificate has the name that others call this machine by.
        insecure = ["--insecure"] if self._config.has_tls else []
        command = ["curl", *insecure, f"{url}/generate", "-H", "Content-Type: application/json"]
        if self._config.has_api_key:
            command += ["-H", "Authorization: Bearer YOUR_API_KEY"]
        command += ["-d", self._config.example_request]
        elapsed_s = time.monotonic() - self._started_at
        self._log.info(f"Ready on {url} after {elapsed_s:.1f} s - try: {shlex.join(command)}")

    def _pause(self, seconds: float) -> None:
        """Waits that long, less if something happens; every wait of the launcher is here."""
        if stop := self._next_stop_signal(seconds):
            raise StopRequested(stop)
        if any(not child.is_alive for child in self._watched()):
            self._fail()

    def _watched(self) -> list[ManagedProcess]:
        """Those whose end is a failure."""
        return [*self._shards, *([self._router] if self._router else [])]

    def _fail(self) -> NoReturn:
        """Raises ChildDied for the child that failed first."""
        ends: dict[ManagedProcess, End] = {}
        deadline = time.monotonic() + CULPRIT_S
        look = 0
        while True:
            for child in self._watched():
                if child not in ends and not child.is_alive:
                    ends[child] = self._end_of_watched(child, look)
            first = first_failure(tuple(ends.values()))
            remaining_s = deadline - time.monotonic()
            is_last = all(not shard.is_alive for shard in self._shards)
            if is_last or remaining_s <= 0 or not may_follow_another(first, len(self._shards)):
                break
            if stop := self._next_stop_signal(min(remaining_s, STARTUP_POLL_S)):
                raise StopRequested(stop)
            look += 1
        told = {child: _with_words(child, end) for child, end in ends.items()}
        [culprit] = [child for child, end in ends.items() if end is first]
        blamed = told.pop(culprit)
        for end in told.values():
            if end.words != blamed.words:  # of the ranks that say the same one is enough
                self._log.info(describe_end(end, self._is_ready))
        raise ChildDied(blamed, self._is_ready, self._who_is_stopped(blamed))

    def _end_of_watched(self, child: ManagedProcess, look: int) -> End:
        code = child.returncode or 0
        if child is self._router:
            return End(child.name, code, seen=look)
        rank = self._shards.index(child)
        return End(child.name, code, kind_of(code, len(self._shards)), rank, look)

    def _who_is_stopped(self, first: End) -> str:
        """When a shard was given up without having ended, why it does not answer."""
        stopped = [shard.name for shard in self._shards if shard.is_stopped]
        if not stopped or first.kind not in (Kind.GAVE_UP, Kind.NOT_A_SHARD):
            return ""
        return f" ({', '.join(stopped)} was stopped, as SIGSTOP does, and does not run)"

    def _next_stop_signal(self, seconds: float) -> signal.Signals | None:
        """Waits for a signal; the one that asks to stop, None for any other end."""
        received = signal.sigtimedwait(self._stop_signals | {signal.SIGCHLD}, seconds)
        # Stopped and continued, CPython reports a signal 0 that nobody sent.
        if received is None or received.si_signo not in self._stop_signals:
            reap_orphans(self._children())
            return None
        return signal.Signals(received.si_signo)

    def _children(self) -> list[ManagedProcess]:
        """Those that were started, in the order in which they are stopped."""
        children = (self._download, self._batch, self._router, *self._shards)
        return [child for child in children if child is not None]

    def _shut_down(self, timeout_s: float, shard_timeout_s: float | None = None) -> bool:
        """Ends the router, then the shards, each within the timeout (the shards' is the same, if
        none is given); False if a second signal cut it short (`run` then kills what is left)."""
        download = [self._download] if self._download else []
        batch = [self._batch] if self._batch else []
        router = [self._router] if self._router else []
        return (
            self._end(download, min(timeout_s, DOWNLOAD_TERMINATION_S))
            and self._end(batch, min(timeout_s, DOWNLOAD_TERMINATION_S))
            and self._end(router, timeout_s)
            and self._end(self._shards, timeout_s if shard_timeout_s is None else shard_timeout_s)
        )

    def _end(self, children: Sequence[ManagedProcess], timeout_s: float) -> bool:
        for child in children:
            child.settle()
            child.terminate()
        deadline = time.monotonic() + timeout_s
        while any(child.is_alive for child in children):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                slow = ", ".join(child.name for child in children if child.is_alive)
                self._log.info(f"{slow} did not stop within {timeout_s:g} s: killing it")
                break
            if stop := self._next_stop_signal(min(remaining_s, STARTUP_POLL_S)):
                self._log.info(f"received {stop.name} again: killing everything")
                return False
        for child in children:
            child.kill()
        return True


def reachable_host(hostname: str) -> str:
    """An address under which a server that listens on `hostname` answers on this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(hostname, hostname)


def connection_to(host: str, port: int, has_tls: bool, timeout_s: float) -> "HTTPConnection":
    """To a server on this machine, whose certificate bears another name: it is not verified."""
    from http.client import HTTPConnection, HTTPSConnection

    if not has_tls:
        return HTTPConnection(host, port, timeout=timeout_s)
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, port, timeout=timeout_s, context=context)


def describe_waiting(said: Sequence[tuple[str, str]]) -> str:
    """Names and what each said last, those together that say the same."""
    names: dict[str, list[str]] = {}
    for name, message in said:
        names.setdefault(message, []).append(name)
    return "; ".join(
        f"{', '.join(group)} to be ready" + (f": {message}" if message else "")
        for message, group in names.items()
    )


def _with_words(child: ManagedProcess, end: End) -> End:
    """The end, with what the child said last: it is not said by anyone else any more."""
    child.drain()
    return replace(end, words=child.last_words())


def _end_of(child: ManagedProcess) -> End:
    """Of one that is no shard."""
    return _with_words(child, End(child.name, child.returncode or 0))
