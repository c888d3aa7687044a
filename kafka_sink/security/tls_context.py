"""Makes a TLS context from settings, and makes it again when its files have changed.

This module also translates cipher suites to OpenSSL's names, and OpenSSL's errors to texts with a remedy.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import HiddenBytes
from kafka_sink.security.settings import Store, TlsSettings
from kafka_sink.security.stores import ClientKey

# OpenSSL uses IANA's names for these. The two other suites of TLS 1.3 are off by default, and Python cannot
# enable them.
TLS13_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_IANA = re.compile(r"TLS_(?P<key>[A-Z_]+?)_WITH_(?P<cipher>[A-Z0-9_]+)")


def split_suites(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the suites up to TLS 1.2 and those of TLS 1.3, by OpenSSL's names. Raises ConfigurationError for
    a suite that this OpenSSL does not have or that is insecure."""
    known = _known()
    older, newer = [], []
    for name in names:
        if name.upper() in TLS13_SUITES:
            newer.append(name.upper())
            continue
        translated = openssl_name(name)
        if translated not in known:
            raise ConfigurationError(
                f"Option 'kafka.ssl.cipher.suites' has {name!r}, which this Python's OpenSSL "
                f"({ssl.OPENSSL_VERSION}) does not have"
            )
        older.append(translated)
    return older, newer


def openssl_name(name: str) -> str:
    """OpenSSL's name of a suite: ``ECDHE-RSA-AES256-GCM-SHA384`` for
    ``TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384``."""
    match = _IANA.fullmatch(name.upper())
    if match is None:
        return name.upper()
    key = match["key"].replace("_", "-")
    cipher = re.sub(r"(AES|CAMELLIA|ARIA)_(128|256)", r"\1\2", match["cipher"])
    cipher = cipher.removesuffix("_SHA256") if cipher.startswith("CHACHA20") else cipher
    cipher = cipher.replace("_CBC_", "-").replace("_", "-")
    return cipher if key == "RSA" else f"{key}-{cipher}"


def _known() -> frozenset[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Exclude suites without authentication (aNULL) or encryption (eNULL), and suites that have been broken.
    context.set_ciphers("ALL:!aNULL:!eNULL:!EXPORT:!RC4:!DES:!3DES:!MD5:!PSK:!SRP")
    return frozenset(str(suite["name"]) for suite in context.get_ciphers())


# OpenSSL's codes of failed verifications (x509_vfy.h).
_EXPIRED, _NOT_YET = 10, 9
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_HOST_MISMATCH, _ADDRESS_MISMATCH = 62, 64
_REMEDY_TRUST = (
    "add the authority that signed it, or the certificate itself, to kafka.ssl.truststore.location or "
    "kafka.ssl.truststore.certificates"
)
_REMEDY_KEY = "set kafka.ssl.keystore.location, or .key and .certificate.chain"

# Explanations for OpenSSL's reasons. A reason with ALERT in it is an alert that the broker sent.
_REASONS = {
    "WRONG_VERSION_NUMBER": "the server at this port does not speak TLS: use a TLS listener's port, or "
    "kafka.security.protocol=PLAINTEXT or SASL_PLAINTEXT",
    "HTTP_REQUEST": "the server at this port speaks HTTP and is not a Kafka broker",
    "UNSUPPORTED_PROTOCOL": "the broker supports no TLS version in kafka.ssl.enabled.protocols",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the broker supports no TLS version in kafka.ssl.enabled.protocols",
    "NO_PROTOCOLS_AVAILABLE": "kafka.ssl.enabled.protocols leaves no TLS version",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the broker and this client have no cipher suite in common "
    f"(kafka.ssl.cipher.suites), or it requires a client certificate: {_REMEDY_KEY}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": f"the broker requires a client certificate: {_REMEDY_KEY}",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the broker refuses this client's certificate, or requires one: "
    + _REMEDY_KEY,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the broker refuses this client's certificate: the broker does not "
    "trust its authority, it has expired, or it is missing: check kafka.ssl.keystore.location",
    "TLSV1_ALERT_UNKNOWN_CA": "the broker does not trust the authority of this client's certificate in "
    "kafka.ssl.keystore",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this client's certificate in kafka.ssl.keystore has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "this client's certificate in kafka.ssl.keystore is revoked",
    "TLSV1_ALERT_ACCESS_DENIED": "the broker refuses this client's certificate",
    "TLSV1_UNRECOGNIZED_NAME": "the broker does not recognise the host name (SNI)",
}


def is_final(error: ssl.SSLError) -> bool:
    """Whether another attempt would fail in the same way. After bytes were damaged on the way, it would
    not."""
    return isinstance(error, ssl.SSLCertVerificationError) or (error.reason or "") in _REASONS


def explain(error: ssl.SSLError, host: str) -> str:
    """Return one clause: what is wrong, and what to change if that is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(error, host)
    reason = error.reason or ""
    if reason in _REASONS:
        return _REASONS[reason]
    return f"OpenSSL reports {reason or error.args[-1]}"


def _certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    code, message = error.verify_code, error.verify_message
    if code in _UNKNOWN_AUTHORITY:
        return f"the broker's certificate is not signed by a trusted authority ({message}): {_REMEDY_TRUST}"
    if code == _EXPIRED:
        return (
            f"the broker's certificate, or one in its chain, has expired ({message}): renew it on the broker"
        )
    if code == _NOT_YET:
        return f"the broker's certificate is not yet valid ({message}): check the clocks"
    if code in (_HOST_MISMATCH, _ADDRESS_MISMATCH):
        return (
            f"the broker's certificate is not for {host} ({message}): connect with a name in the certificate "
            "(kafka.bootstrap.servers, the brokers' advertised.listeners), or get one issued for this name; "
            "kafka.ssl.endpoint.identification.algorithm switches the check off"
        )
    return f"the broker's certificate is not accepted: {message}"


_log = logging.getLogger(__name__)
_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}

_Stamp = tuple[tuple[int, int, int] | None, ...]


def make_context(settings: TlsSettings) -> ssl.SSLContext:
    """Read all files and make a context. Raises ConfigurationError with the option and the file that cannot
    be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = settings.check_host
    context.minimum_version = _VERSIONS[settings.protocols[0]]
    context.maximum_version = _VERSIONS[settings.protocols[-1]]
    # A broker has no reason to renegotiate, and compression can reveal encrypted text.
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    if settings.trust is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if not any(context.cert_store_stats().values()) and ssl.get_default_verify_paths().capath is None:
            raise ConfigurationError(
                "the system has no trusted authorities for this Python: set kafka.ssl.truststore.location"
            )
    else:
        from kafka_sink.security.key_material import read_trust

        # Every certificate in the truststore is a trust anchor, not only self-signed roots, as in Java.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        for certificate in read_trust(settings.trust):
            context.load_verify_locations(cadata=certificate)
    if settings.cipher_suites:
        _restrict_suites(context, settings)
    if settings.key is not None:
        from kafka_sink.security.key_material import read_key

        load_key(context, read_key(settings.key), settings.key.option)
    return context


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


def load_key(context: ssl.SSLContext, key: ClientKey, option: str) -> None:
    """Load the key through a pipe: Python reads keys from files only, and a pipe never touches a disk."""
    with _pipe(key.chain) as chain, _pipe(HiddenBytes(key.key.reveal().encode())) as secret:
        try:
            context.load_cert_chain(chain, secret)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"Option '{option}': OpenSSL refuses the certificate or its key ({error.reason})"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"Option '{option}': a key can be used only if this host has /dev/fd, which needs /proc: "
                f"{error.strerror}. Mount /proc, or log in without a certificate of the client"
            ) from None


@contextmanager
def _pipe(data: bytes) -> Iterator[str]:
    """Return a path from which these bytes can be read once."""
    reader, writer = os.pipe()
    # A pipe holds 64 KiB or less, so a longer chain must be written while it is read.
    thread = threading.Thread(target=_write, args=(writer, data), name="kafka-chunked-key", daemon=True)
    thread.start()
    try:
        yield f"/dev/fd/{reader}"
    finally:
        os.close(reader)
        thread.join()


def _write(writer: int, data: bytes) -> None:
    try:
        with os.fdopen(writer, "wb") as file:
            file.write(data)
    except BrokenPipeError:
        pass  # OpenSSL stopped before the end


class TlsContexts:
    """The context for one set of options. New connections get a context of the files as they are now.

    A file that is being replaced may be unreadable for a moment. The previous context is used meanwhile.
    Thread-safe.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        # Guards `_context` and `_stamp`: without it, two threads could store the context of an older file
        # with the stamp of a newer one.
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._stamp: _Stamp = ()

    def current(self) -> ssl.SSLContext:
        """Return the context of the files as they are now. Raises ConfigurationError if no usable context has
        been made before."""
        with self._lock:
            stamp = _stamp_of(self._settings)
            if self._context is not None and stamp == self._stamp:
                return self._context
            try:
                self._context = make_context(self._settings)
            except ConfigurationError as error:
                if self._context is None:
                    raise
                _log.warning(
                    "the TLS files have changed and cannot be used; the previous ones stay in use: %s", error
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
        # The target of a symbolic link counts, because Kubernetes renews mounted secrets by changing links.
        status = os.stat(store.location)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
