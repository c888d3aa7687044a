"""Cipher suites under the names of Java (IANA's) and of OpenSSL."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable

from kafka_sink.errors import ConfigurationError

# OpenSSL has IANA's own names for these; the last two are off by default, and Python cannot switch them on.
TLS13_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_IANA = re.compile(r"TLS_(?P<key>[A-Z_]+?)_WITH_(?P<cipher>[A-Z0-9_]+)")


def split_suites(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(suites up to TLS 1.2, suites of TLS 1.3) by OpenSSL's names. Raises ConfigurationError for a name that
    this OpenSSL does not have, or that protects nothing."""
    known = _known()
    older, newer = [], []
    for name in names:
        if name.upper() in TLS13_SUITES:
            newer.append(name.upper())
            continue
        translated = openssl_name(name)
        if translated not in known:
            raise ConfigurationError(
                f"Option 'kafka.ssl.cipher.suites' names {name!r}, which this Python's OpenSSL "
                f"({ssl.OPENSSL_VERSION}) does not have"
            )
        older.append(translated)
    return older, newer


def openssl_name(name: str) -> str:
    """``TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384`` is OpenSSL's ``ECDHE-RSA-AES256-GCM-SHA384``."""
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
    # Without authentication or encryption (aNULL, eNULL) and what is broken by now.
    context.set_ciphers("ALL:!aNULL:!eNULL:!EXPORT:!RC4:!DES:!3DES:!MD5:!PSK:!SRP")
    return frozenset(str(suite["name"]) for suite in context.get_ciphers())
