"""Frames, sessions and connections between the coordinator and its clients."""
