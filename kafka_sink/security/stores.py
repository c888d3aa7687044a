"""The files and PEM texts with certificates and keys: their content, and how messages refer to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kafka_sink.errors import ConfigurationError
from kafka_sink.printable import one_line
from kafka_sink.secret import HiddenBytes, Secret
from kafka_sink.security.settings import Store


@dataclass(frozen=True)
class ClientKey:
    """A private key as unencrypted PKCS#8 PEM, and its certificate chain as PEM, with its own certificate
    first."""

    key: Secret
    chain: bytes


def named(store: Store) -> str:
    """The store's option and its file, for messages."""
    where = f" = {one_line(store.location)}" if store.location else ""
    return f"Option '{store.option}'{where}"


def content_of(store: Store) -> HiddenBytes:
    """Return the content of a store. Raises ConfigurationError if the file cannot be read."""
    if store.text:
        return HiddenBytes(store.text.reveal().encode())
    path = Path(store.location)
    try:
        if not (path.is_fifo() or path.is_char_device()):
            return HiddenBytes(path.read_bytes())
        # Reading from a pipe or a device may never end.
        reason = "it is a pipe or a device, not a file"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except ValueError:
        reason = "its name contains a null character"
    raise ConfigurationError(f"{named(store)} cannot be read: {reason}")
