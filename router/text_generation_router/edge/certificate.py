"""The TLS certificate, which is reloaded when its files change."""

import logging
import os
import ssl
from contextlib import suppress

from text_generation_router.config import RouterConfig

logger = logging.getLogger(__name__)


class CertificateError(ValueError):
    """The files hold no certificate with its key; one sentence says why."""


class Certificate:
    """Owns the context of all connections. New ones use what the files hold now, if that is a
    certificate with its key.

    Raises CertificateError.
    """

    def __init__(self, certfile: str, keyfile: str) -> None:
        self._files = (certfile, keyfile)
        self._seen = self._state()
        self.context = _context()
        self._load(self.context)

    @classmethod
    def of(cls, config: RouterConfig) -> "Certificate | None":
        """The certificate of the flags, if they are given. Raises CertificateError."""
        if config.ssl_certfile is None or config.ssl_keyfile is None:
            return None
        return cls(config.ssl_certfile, config.ssl_keyfile)

    def refresh(self) -> None:
        """Reads the files if they have changed. An unusable certificate is logged once."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            # Into another context first: a failure would leave half of a pair in this one.
            self._load(_context())
            self._load(self.context)
        except CertificateError as error:
            logger.error("%s; the previous certificate stays in use", error)
        else:
            logger.info("The new certificate is in use for new connections")

    def _load(self, context: ssl.SSLContext) -> None:
        """Raises CertificateError."""
        certfile, keyfile = self._files
        try:
            for path in self._files:
                # OpenSSL's error does not name the file.
                open(path, "rb").close()
            # An empty password, so that OpenSSL does not prompt for one.
            context.load_cert_chain(certfile, keyfile, password="")
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
            raise CertificateError(
                f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile} can not be used "
                f"({reason}); give a PEM certificate and the key it was made with, without a "
                "password"
            ) from error

    def _state(self) -> list[tuple[int, int, int]]:
        """Changes when one of the files is written or replaced; empty if one is missing."""
        with suppress(OSError):
            found = [os.stat(path) for path in self._files]
            return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]
        return []


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
