"""All addresses that one launcher holds while it runs."""

from contextlib import ExitStack, closing

from text_generation_process.defaults import SOCKET_NAME

from text_generation_launcher.address import (
    MeetingPort,
    SocketClaim,
    claim_port,
    private_folder,
)
from text_generation_launcher.config import LauncherConfig
from text_generation_launcher.option import Mode


class Addresses:
    """Owns ports and sockets until closed, also while the processes that use them are replaced."""

    def __init__(self, config: LauncherConfig) -> None:
        """Raises AddressError for an address that can not be used, and then holds none."""
        with ExitStack() as stack:
            if config.mode is Mode.SERVE:
                stack.enter_context(claim_port(config.hostname, config.port, "--port"))
            if config.prometheus_port is not None:
                flag = "--prometheus-port"
                stack.enter_context(claim_port(config.hostname, config.prometheus_port, flag))
            self.meeting: MeetingPort | None = None
            """Where several shards meet."""
            if len(config.shards) > 1:
                meeting = MeetingPort(config.master_addr, config.master_port)
                self.meeting = stack.enter_context(closing(meeting))
            prefix = config.shard_uds_path
            if prefix is None:
                places = config.runtime_folder, config.temporary_folders
                folder = private_folder(*places, len(config.shards))
                stack.enter_context(closing(folder))
                prefix = str(folder.path / SOCKET_NAME)
            sockets = SocketClaim(prefix, len(config.shards))
            self.sockets = stack.enter_context(closing(sockets))
            """Where shards listen."""
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Releases them."""
        self._stack.close()
