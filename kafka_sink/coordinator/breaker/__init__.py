"""Mutes that tasks share (KIP-693): messages, the coordinator's handler, a task's channel."""
