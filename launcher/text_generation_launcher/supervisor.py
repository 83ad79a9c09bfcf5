"""What the launcher does, from the first check to the end of the last child.

    check -> download -> shards and router -> ready -> watch -> shut down

While the server runs, shards and router that end are replaced, except with --no-restart. A router
that does not answer any more is ended, with --no-restart, too. The mode `shards` has no router. In
the mode `batch` the requests of a file take its place, and the launcher ends with them.

Every wait goes through `Supervisor._pause`. It raises StopRequested when a signal stops the
launcher, and ChildDied when a child that should run has ended.
"""

import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from text_generation_process.option import Mode
from text_generation_process.sockets import AddressError

from text_generation_launcher.addresses import Addresses, SocketClaim
from text_generation_launcher.config import MODEL_PATH, RENDEZVOUS_PORT, SOCKETS, LauncherConfig
from text_generation_launcher.ends import (
    CAUSE_S,
    ChildDied,
    Part,
    Restarts,
    describe_stopped,
    diagnose,
    grouped,
)
from text_generation_launcher.process import (
    STOP_SIGNALS,
    Command,
    Log,
    ManagedProcess,
    ProcessError,
    reap_orphans,
)
from text_generation_launcher.router_link import TOLD, RouterLink, how_to_ask, is_healthy

STARTUP_POLL_S = 0.02
WATCH_POLL_S = 1.0
"""Only a fallback: the end of a child and a signal are noticed at once."""
LISTEN_POLL_S = 0.25
"""How often the router's heartbeat is read."""
WAITING_NOTICE_S = 5.0
TASK_TERMINATION_S = 10.0
"""Short, because a download or a batch continues later where it stopped."""
FAILURE_TERMINATION_S = 10.0
"""Short, because after a failure running requests can't finish."""
SHARD_FAILURE_TERMINATION_S = 2.0
"""Shorter, because shards may wait for one that is gone, or be stopped and not handle SIGTERM."""
LAST_EVENTS_S = 1.5
"""After a second signal the router sends last events for a second, and then ends."""


class StopRequested(Exception):
    """The launcher has received the stop signal `number`."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"received {number.name}")
        self.number = number


class Supervisor:
    """Owns the children. Used once, from the main thread, after `block_signals()`."""

    def __init__(self, config: LauncherConfig, log: Log) -> None:
        self._config = config
        self._log = log
        self._started_at = time.monotonic()
        self._model_path = config.model_path
        self._task: list[ManagedProcess] = []
        """The download or the batch, which end by themselves."""
        self._shards = Part(self._start_shards, self._clear_shards)
        self._router = Part(self._start_router, self._close_link)
        parts = (self._shards, self._router) if config.mode is Mode.SERVE else (self._shards,)
        self._restarts = Restarts(parts, self._is_ready, self._announce, log, config.restarts)
        self._addresses: Addresses | None = None
        self._link: RouterLink | None = None
        self._is_socket_awaited = True
        self._notice_at = 0.0
        """When the log says what is waited for."""
        # With nohup the server outlives its terminal.
        ignored = {s for s in STOP_SIGNALS if signal.getsignal(s) == signal.SIG_IGN}
        self._stop_signals = STOP_SIGNALS - (ignored & {signal.SIGHUP})

    def run(self) -> int:
        """Serves until a signal or a failure, or answers a batch; returns the exit code. All
        children have ended then."""
        try:
            self._addresses = Addresses(self._config)
            self._model_path = self._model_path or self._download()
            while not (self._config.mode is Mode.BATCH and self._restarts.is_whole):
                self._watch()
            return self._answer_batch()
        except StopRequested as request:
            self._log.info(f"{request}: stopping, a second signal ends everything at once")
            is_orderly = self._shut_down(self._config.termination_timeout_s)
            if self._config.mode is Mode.BATCH:
                return 128 + request.number  # an interrupted batch is a failure
            return 0 if is_orderly else 1
        except (AddressError, ProcessError) as error:
            self._log.error(str(error))
            self._shut_down(FAILURE_TERMINATION_S, SHARD_FAILURE_TERMINATION_S)
            return 1
        except ChildDied as error:
            self._log.info(f"{error.how}: stopping the other processes")
            self._shut_down(FAILURE_TERMINATION_S, SHARD_FAILURE_TERMINATION_S)
            # After the last lines of the others: the last line of the log is the reason.
            self._log.error(str(error))
            return 1
        finally:
            for child in self._children():
                child.kill()
            self._close_link()
            if self._addresses:
                self._addresses.close()

    def _download(self) -> Path:
        """The directory of a hub model, after its download."""
        assert self._config.download is not None
        download = ManagedProcess(self._config.download, self._log.write)
        if self._complete(download) != 0:
            raise self._death_of([download])
        download.settle()
        self._task = []
        path = (download.answer or {}).get("model_path")
        if not isinstance(path, str):
            raise ProcessError(
                "the download ended without the model's directory as its last line: "
                "check that the installed packages are of one version"
            )
        return Path(path)

    def _complete(self, task: ManagedProcess) -> int:
        """The exit code of a child that ends by itself."""
        self._task = [task]
        while task.is_alive:
            self._pause(WATCH_POLL_S)
        task.drain()
        return task.returncode or 0

    def _watch(self) -> None:
        """Starts what is due and waits a moment; then ends and replaces what does not work. Raises
        StopRequested, and ChildDied if a child is not replaced."""
        restarts = self._restarts
        try:
            restarts.bring_back(time.monotonic())
            self._pause(LISTEN_POLL_S if restarts.has_served else STARTUP_POLL_S)
            self._listen()
            if restarts.is_late(time.monotonic()):
                # Any of them may be the cause.
                how = f"the replaced processes do not serve after {restarts.patience_s:g} s"
                self._end_failed(self._watched(), how)
        except ChildDied as died:
            restarts.take_away(died, time.monotonic())

    @property
    def _sockets(self) -> SocketClaim:
        """The sockets on which shards listen."""
        assert self._addresses is not None
        return self._addresses.sockets

    def _start_shards(self, _: int) -> Iterator[ManagedProcess]:
        if len(self._config.shards) > 1:
            self._log.info(f"Splitting the model over {len(self._config.shards)} shards")
        yield from map(self._start, self._config.shards)

    def _clear_shards(self) -> None:
        self._is_socket_awaited = True
        self._sockets.remove_sockets()

    def _start_router(self, num_restarts: int) -> Iterator[ManagedProcess]:
        """Does not wait for the shards: the router has work to do before it needs them."""
        command = self._config.router
        assert command is not None
        self._link = link = RouterLink()
        own = (f"--launcher-fd={link.router_fd}", f"--num-restarts={num_restarts}")
        router = self._start(
            replace(command, argv=command.argv + own, descriptors=(link.router_fd,))
        )
        link.hand_over()
        yield router

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def _start(self, command: Command) -> ManagedProcess:
        known = {MODEL_PATH: str(self._model_path), SOCKETS: self._sockets.prefix}
        if self._addresses and self._addresses.rendezvous:
            known[RENDEZVOUS_PORT] = str(self._addresses.rendezvous.number)
        argv = command.argv
        for name, value in known.items():
            argv = tuple(part.replace(name, value) for part in argv)
        self._notice_at = time.monotonic() + WAITING_NOTICE_S
        return ManagedProcess(replace(command, argv=argv), self._log.write)

    def _is_ready(self) -> bool:
        """Whether shards and router serve; until then tells and logs what they do."""
        waiting = []
        for shard, path in zip(self._shards.children, self._sockets.paths, strict=True):
            if Path(path).exists():
                shard.settle()
            else:
                waiting.append(shard)
        if not waiting and self._router.children and not is_healthy(self._config):
            waiting = self._router.children
        if not waiting:
            for router in self._router.children:
                router.settle()
            if self._link is not None:
                self._link.note_serving()
            return True
        if self._link is not None:
            # It forgets this once it is connected to the shards.
            messages = [(shard.name, shard.last_message) for shard in self._shards.children]
            self._link.tell(grouped([one for one in messages if one[1].startswith(TOLD)]))
        if time.monotonic() >= self._notice_at:
            messages = [(child.name, child.last_message) for child in waiting]
            self._log.info(f"Waiting for {grouped(messages, ' to be ready')}")
            self._notice_at += WAITING_NOTICE_S
        return False

    def _announce(self) -> None:
        after = f"after {time.monotonic() - self._started_at:.1f} s - try"
        if self._config.mode is Mode.SERVE:
            url, example = how_to_ask(self._config)
            self._log.info(f"Ready on {url} {after}: {example}")
        if self._config.mode is not Mode.SHARDS:
            return
        socket_path = self._sockets.paths[0]
        example = shlex.join(["text-generation-benchmark", "--master-shard-uds-path", socket_path])
        self._log.info(f"Ready on unix:{socket_path} {after}: {example}")
        self._log.answer(
            {
                "model_id": self._config.model_id,
                "model_path": str(self._model_path),
                "master_shard_uds_path": socket_path,
            }
        )

    def _answer_batch(self) -> int:
        """Returns the exit code of the batch, after it and the shards have ended."""
        assert self._config.router is not None
        batch = self._start(self._config.router)
        batch.settle()
        code = self._complete(batch)
        if code < 0:
            raise self._death_of([batch])
        if code:
            self._pause(CAUSE_S)  # it may have failed because a shard failed
        self._shut_down(self._config.termination_timeout_s)
        return code

    def _end_failed(self, children: Sequence[ManagedProcess], how: str) -> NoReturn:
        """Kills children that do not work as they should. Raises ChildDied."""
        how += describe_stopped(children)
        for child in children:
            child.kill()
        raise ChildDied(how, how)

    def _listen(self) -> None:
        """Ends a router that no longer answers, so that its clients do not wait for ever, or shards
        that it has declared lost if they are replaced. Then raises ChildDied."""
        if self._link is None:
            return
        if self._link.is_silent(time.monotonic()):
            how = f"the router has not answered for {self._link.silence_s:g} s"
            self._end_failed(self._router.children, how)
        # Those of the first start are kept until all serve.
        losses = self._link.take_losses() if self._restarts.has_served else []
        if self._is_socket_awaited:
            # The losses are of the shards before. The router finds the new ones by their first
            # socket, and may declare them lost while their other sockets do not exist yet.
            self._is_socket_awaited = not Path(self._sockets.paths[0]).exists()
        elif losses and self._config.restarts:
            how = f"the router has declared the shards lost: {losses[-1]}"
            self._end_failed(self._shards.children, how)

    def _pause(self, seconds: float) -> None:
        """Waits, until a signal or the end of a child at most. Raises StopRequested, ChildDied."""
        self._wait(seconds)
        if any(not child.is_alive for child in self._watched()):
            was_ready = self._restarts.has_served
            raise self._death_of(self._shards.children, self._router.children, was_ready)

    def _death_of(
        self,
        shards: list[ManagedProcess],
        router: Sequence[ManagedProcess] = (),
        was_ready: bool = False,
    ) -> ChildDied:
        return diagnose(shards, router, self._wait, self._log, was_ready)

    def _watched(self) -> list[ManagedProcess]:
        """The children whose end is a failure."""
        return [*self._shards.children, *self._router.children]

    def _wait(self, seconds: float) -> None:
        """Raises StopRequested."""
        if stop := self._next_stop_signal(seconds):
            raise StopRequested(stop)

    def _next_stop_signal(self, seconds: float) -> signal.Signals | None:
        """Waits for a stop signal; None after the time or another signal."""
        received = signal.sigtimedwait(self._stop_signals | {signal.SIGCHLD}, seconds)
        # After SIGSTOP and SIGCONT CPython reports a signal 0.
        if received is None or received.si_signo not in self._stop_signals:
            reap_orphans(self._children())
            return None
        return signal.Signals(received.si_signo)

    def _children(self) -> list[ManagedProcess]:
        """The started children, in the order in which they are stopped."""
        return [*self._task, *self._router.children, *self._shards.children]

    def _shut_down(self, timeout_s: float, shard_timeout_s: float | None = None) -> bool:
        """Ends the router, then the shards, each within its timeout (`timeout_s` by default).
        False after a second signal; `run` then kills the remaining children."""
        shard_timeout_s = timeout_s if shard_timeout_s is None else shard_timeout_s
        return (
            self._end(self._task, min(timeout_s, TASK_TERMINATION_S))
            and self._end(self._router.children, timeout_s)
            and self._end(self._shards.children, shard_timeout_s)
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
                self._hasten_router()
                return False
        for child in children:
            child.kill()
        return True

    def _hasten_router(self) -> None:
        """Gives the router a moment to end running requests; a third signal skips it."""
        deadline = time.monotonic() + LAST_EVENTS_S
        for router in self._router.children:
            router.terminate()
            while router.is_alive and (remaining_s := deadline - time.monotonic()) > 0:
                if self._next_stop_signal(min(remaining_s, STARTUP_POLL_S)):
                    return
