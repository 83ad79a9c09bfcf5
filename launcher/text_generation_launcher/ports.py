"""The TCP ports of the server, checked before weights are loaded."""

import errno
import socket

from text_generation_process.sockets import AddressError, bind_port


class PortClaim:
    """Holds a port for the processes of this launcher alone, until closed.

    It is bound and does not listen: the system gives it to no process that asks for any free port,
    and a child can still listen on it, with SO_REUSEADDR. Until then the system would give it to
    several launchers. An abstract unix socket, which has no file and ends with its process,
    excludes them.
    """

    def __init__(
        self, hostname: str, port: int | None, flag: str, address_flag: str = "--hostname"
    ) -> None:
        """None: any free port. Raises AddressError, naming the flags that would help."""
        self._held = _bind(hostname, port or 0, flag, address_flag)
        address, self.number = self._held.getsockname()[:2]
        """The port."""
        name = f"text-generation-launcher:{address}:{self.number}"
        self._claim = socket.socket(socket.AF_UNIX)
        try:
            self._claim.bind(f"\0{name}")
        except OSError as error:
            self.close()
            raise AddressError(
                f"port {self.number} on {hostname} is already in use: another launcher that is "
                f"starting, or some program of this machine, holds the socket name @{name}: "
                f"choose another port with {flag}"
            ) from error

    def close(self) -> None:
        """Releases the port."""
        self._claim.close()
        self._held.close()


def _bind(hostname: str, port: int, flag: str, address_flag: str) -> socket.socket:
    try:
        # Shards that meet use an address of version 4 where a name has both.
        return bind_port(hostname, port, prefers_ipv4=address_flag == "--master-addr")
    except socket.gaierror:
        everywhere = ", 0.0.0.0 for all" if address_flag == "--hostname" else ""
        raise AddressError(
            f"{hostname} is not an address of this machine: give {address_flag} an IP address"
            f"{everywhere}"
        ) from None
    except OSError as error:
        why = {
            errno.EADDRINUSE: f"port {port} on {hostname} is already in use: choose another with "
            f"{flag}",
            errno.EACCES: f"port {port} needs privileges: choose one above 1023 with {flag}",
            errno.EADDRNOTAVAIL: f"{hostname} is not an address of this machine: choose another "
            f"with {address_flag}",
        }
        other = f"cannot listen on {hostname} port {port}: {error.strerror}"
        raise AddressError(why.get(error.errno or 0, other)) from error
