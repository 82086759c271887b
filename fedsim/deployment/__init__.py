"""Federations of separate processes, on one machine or several: keys, folders, commands. Flower runs as separate programs."""
