"""Federations of separate processes, on one machine or several: their keys, folders, commands and supervision."""
