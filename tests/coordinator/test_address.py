"""The address in a planned write, and the warning if there is no coordinator."""

from __future__ import annotations

from tests.support.coordinator_harness import address_at, identity


def test_secrets_of_an_address_are_hidden() -> None:
    one = identity()
    for secret in (one.token.hex(), repr(one.token), one.name):
        assert secret not in repr(address_at(1, one))
