"""The error of everything here."""

from __future__ import annotations


class LocalBrokerError(Exception):
    """The broker or the schema registry could not be fetched, started or stopped."""
