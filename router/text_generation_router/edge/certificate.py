"""The TLS certificate, which is reloaded when its files change."""

import logging
import os
import ssl

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
        self._seen = _state(self._files)
        self.context = _context()
        _load(self.context, *self._files)

    @classmethod
    def of(cls, config: RouterConfig) -> "Certificate | None":
        """The certificate of the flags, if they are given. Raises CertificateError."""
        if config.ssl_certfile is None or config.ssl_keyfile is None:
            return None
        return cls(config.ssl_certfile, config.ssl_keyfile)

    def refresh(self) -> None:
        """Reads the files if they have changed. An unusable certificate is logged once."""
        state = _state(self._files)
        if state == self._seen:
            return
        self._seen = state
        try:
            # Into another context first: a failure would leave half of a pair in this one.
            _load(_context(), *self._files)
            _load(self.context, *self._files)
        except CertificateError as error:
            logger.error("%s; the previous certificate stays in use", error)
        else:
            logger.info("The new certificate is in use for new connections")


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load(context: ssl.SSLContext, certfile: str, keyfile: str) -> None:
    _check_holds("--ssl-certfile", certfile, "CERTIFICATE-----")
    _check_holds("--ssl-keyfile", keyfile, "PRIVATE KEY-----")
    try:
        # An empty password, so that OpenSSL does not prompt for one.
        context.load_cert_chain(certfile, keyfile, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise CertificateError(
                f"The key in --ssl-keyfile {keyfile} does not fit the certificate in "
                f"--ssl-certfile {certfile}; give the key it was made with"
            ) from error
        raise CertificateError(
            f"--ssl-certfile {certfile} with --ssl-keyfile {keyfile} can not be used "
            f"({getattr(error, 'reason', None) or error}); give a PEM certificate and its key "
            "without a password"
        ) from error


def _check_holds(flag: str, path: str, words: str) -> None:
    try:
        with open(path, encoding="latin-1") as file:
            is_there = words in file.read()
    except OSError as error:
        raise CertificateError(
            f"{flag} {path} can not be read: {error.strerror}; give a PEM file that this user may "
            "read"
        ) from error
    if not is_there:
        what = "certificate" if words.startswith("CERT") else "private key"
        raise CertificateError(f"{flag} {path} holds no {what}; give it in PEM form")


def _state(paths: tuple[str, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    """A value that changes when one of the files is written or replaced."""
    return tuple(map(_state_of, paths))


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
