"""Where a query's checkpoint is, and the id that Spark has written into it: they identify the query."""

from __future__ import annotations

import json
import os
import posixpath
from typing import NamedTuple

from kafka_sink.errors import ConfigurationError

# Spark writes this file into a checkpoint before it plans the first batch. It has the query's permanent id.
_METADATA = "metadata"


class Location(NamedTuple):
    """A location, split and normalised as Hadoop's Path does it. Scheme and authority may be empty."""

    scheme: str
    authority: str
    path: str

    @classmethod
    def of(cls, text: str) -> Location:
        """Take any text, as Path does, without any quoting. Hadoop ignores the case of its file systems."""
        before, colon, rest = text.partition(":")
        scheme = before.lower() if colon and "/" not in before else ""
        path, authority = rest if scheme else text, ""
        if path.startswith("//") and len(path) > 2:
            authority, slash, below = path[2:].partition("/")
            path = slash + below
        path = posixpath.normpath(path) if path else ""
        # normpath keeps two leading slashes, because POSIX gives them a meaning of their own.
        return cls(scheme, authority.lower(), "/" + path.lstrip("/") if path.startswith("/") else path)


def query_id(text: str, *, is_required: bool = True) -> str | None:
    """The id of the query whose checkpoint this is, or None if the checkpoint is not on this host.

    Raises ConfigurationError if the folder is here and the id cannot be read from it. If the id is required,
    it also raises if the file system of the location is not certain.
    """
    location = Location.of(text)
    # The location may be on this host. Without a scheme, Spark's default file system decides.
    if location.scheme in ("", "file") and location.authority in ("", "localhost"):
        try:
            with open(posixpath.join(location.path, _METADATA), encoding="utf-8") as file:
                return str(json.load(file)["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"its file '{_METADATA}' cannot be read here: {error}"
            if is_required:
                raise ConfigurationError(_unknown(text, why)) from None
            # An earlier run may have read the file. If the location stood for the query now, its last batch
            # would be written again under another name.
            if os.path.isdir(location.path) and not isinstance(error, FileNotFoundError):
                raise ConfigurationError(f"Option 'checkpointLocation' = {text}: {why}") from None
    elif is_required and (not location.scheme or (location.scheme == "hdfs" and not location.authority)):
        raise ConfigurationError(_unknown(text, "it leaves the choice of its file system to a default"))
    return None


def _unknown(text: str, why: str) -> str:
    return (
        f"Option 'checkpointLocation' = {text} does not identify the query, because {why}. Write it in full, "
        " such as hdfs://namenode:8020/checkpoints/orders, or set transactional.id.prefix"
    )
