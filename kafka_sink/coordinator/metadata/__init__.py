"""Metadata hints (KIP-526): messages, the coordinator's handler, a task's channel."""
