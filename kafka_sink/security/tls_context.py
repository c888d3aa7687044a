"""A TLS context from settings, built again when its files have changed."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable

from kafka_sink.errors import ConfigurationError
from kafka_sink.security.key_material import ClientKey, read_key, read_trust
from kafka_sink.security.openssl_names import split_suites
from kafka_sink.security.settings import Store, TlsSettings

_log = logging.getLogger(__name__)
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}

_Stamp = tuple[tuple[int, int, int] | None, ...]


def make_context(settings: TlsSettings) -> ssl.SSLContext:
    """Read all files. Raises ConfigurationError, naming option and file, where one is of no use."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = settings.check_host
    context.minimum_version = _VERSIONS[settings.protocols[0]]
    context.maximum_version = _VERSIONS[settings.protocols[-1]]
    # A broker has no reason to renegotiate, and compression leaks what is encrypted.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if settings.trust is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if not any(context.cert_store_stats().values()) and not _default_folder_exists():
            raise ConfigurationError(
                "the system has no trusted authorities for this Python: name them in "
                "kafka.ssl.truststore.location"
            )
    else:
        # As in Java whatever is in a truststore is trusted, not self-signed authorities alone.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        for certificate in read_trust(settings.trust):
            context.load_verify_locations(cadata=certificate)
    if settings.cipher_suites:
        _restrict_suites(context, settings)
    if settings.key is not None:
        _load_key(context, read_key(settings.key), settings.key.option)
    return context


def _default_folder_exists() -> bool:
    paths = ssl.get_default_verify_paths()
    return paths.capath is not None


def _restrict_suites(context: ssl.SSLContext, settings: TlsSettings) -> None:
    older, newer = split_suites(settings.cipher_suites)
    if not older:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not newer:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    if (older or newer) and context.minimum_version > context.maximum_version:
        raise ConfigurationError(
            "kafka.ssl.cipher.suites has no suite for any version in kafka.ssl.enabled.protocols"
        )
    if older:
        context.set_ciphers(":".join(older))


def _load_key(context: ssl.SSLContext, key: ClientKey, option: str) -> None:
    """Python takes keys from files only; a pipe is one that never touches a disk."""
    with _Pipe(key.chain) as chain, _Pipe(key.key.reveal().encode()) as secret:
        try:
            context.load_cert_chain(chain.path, secret.path)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"Option '{option}': OpenSSL refuses the certificate or its key ({error.reason})"
            ) from None


class _Pipe:
    """Bytes to be read once from ``path``."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> _Pipe:
        self._reader, writer = os.pipe()
        self.path = f"/dev/fd/{self._reader}"
        # A pipe holds 64 KiB, or less; a longer chain must be written while it is read.
        self._thread = threading.Thread(
            target=self._write, args=(writer,), name="kafka-chunked-key", daemon=True
        )
        self._thread.start()
        return self

    def _write(self, writer: int) -> None:
        try:
            with os.fdopen(writer, "wb") as file:
                file.write(self._data)
        except BrokenPipeError:
            pass  # OpenSSL had seen enough

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        self._thread.join()
        self._data = b""


class TlsContexts:
    """The context of one set of options; new connections get one from the files as they are now.

    Files that are being replaced may be unreadable for a moment: the previous context is used meanwhile.
    Any thread.
    """

    def __init__(
        self, settings: TlsSettings, make: Callable[[TlsSettings], ssl.SSLContext] = make_context
    ) -> None:
        self._settings = settings
        self._make = make
        self._lock = threading.Lock()  # guards the two below
        self._context: ssl.SSLContext | None = None
        self._stamp: _Stamp = ()

    def current(self) -> ssl.SSLContext:
        """Raise ConfigurationError where there never was a usable one."""
        with self._lock:
            stamp = _stamp_of(self._settings)
            if self._context is not None and stamp == self._stamp:
                return self._context
            try:
                self._context = self._make(self._settings)
            except ConfigurationError as error:
                if self._context is None:
                    raise
                _log.warning(
                    "the TLS files have changed and cannot be used; going on with the old: %s", error
                )
            self._stamp = stamp
            return self._context


def _stamp_of(settings: TlsSettings) -> _Stamp:
    stores = [settings.trust, settings.key, None if settings.key is None else settings.key.chain]
    return tuple(_stamp_of_file(store) for store in stores if store is not None)


def _stamp_of_file(store: Store) -> tuple[int, int, int] | None:
    if not store.location:
        return None
    try:
        # The target of a symbolic link counts: Kubernetes renews mounted secrets by turning links over.
        status = os.stat(store.location)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
