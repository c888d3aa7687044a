"""Rates, memory and reactions, measured against the peers: ``python -m benchmarks [NAME ...]``."""
