"""The TCP ports of the server, checked before weights are loaded."""

import errno
import socket

from text_generation_process import ports
from text_generation_process.ports import bind_port

_OWNER = "text-generation-launcher"
"""Of the claims with which launchers exclude each other from a port."""


class AddressError(Exception):
    """An address that can't be used, in one sentence."""


def claim_port(hostname: str, port: int, flag: str) -> socket.socket:
    """Raises AddressError if the port can't be listened on; `flag` is what would change it.

    Until the returned socket is closed, no other launcher gets the port. The port itself can't be
    held for the router: the system would give it to several launchers until one of their routers
    listens, which is when its model is loaded.
    """
    with _bind(hostname, port, flag, "--hostname") as bound:
        return _claim(bound, hostname, flag)


class RendezvousPort:
    """Holds the port where shards meet for those of this launcher alone, until closed.

    It is bound and does not listen, so the system gives it to no process that asks for any free
    port. Rank 0 can still listen on it, with SO_REUSEADDR. The claim excludes other launchers.
    """

    def __init__(self, address: str, port: int | None) -> None:
        """None: any free port. Raises AddressError."""
        flag = "--master-port"
        self._held = _bind(address, port or 0, flag, "--master-addr")
        self.number: int = self._held.getsockname()[1]
        """The port."""
        try:
            self._claim = _claim(self._held, address, flag)
        except AddressError:
            self._held.close()
            raise

    def close(self) -> None:
        """Releases the port."""
        self._claim.close()
        self._held.close()


def _bind(hostname: str, port: int, flag: str, address_flag: str) -> socket.socket:
    """Raises AddressError, naming the flags that would help."""
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
        raise AddressError(_why_not(error, hostname, port, flag, address_flag)) from error


def _claim(bound: socket.socket, hostname: str, flag: str) -> socket.socket:
    try:
        return ports.claim_port(_OWNER, bound)
    except ports.NameHeldError as error:
        raise AddressError(
            f"port {bound.getsockname()[1]} on {hostname} is already in use: another launcher that "
            f"is starting, or some program of this machine, holds the socket name @{error.name}: "
            f"choose another port with {flag}"
        ) from error


def _why_not(error: OSError, hostname: str, port: int, flag: str, address_flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {hostname} is already in use: choose another with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{hostname} is not an address of this machine: choose another with {address_flag}"
    return f"cannot listen on {hostname} port {port}: {error.strerror}"
