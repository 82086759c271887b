"""Replay: runs attacks on the observations of a recording."""
