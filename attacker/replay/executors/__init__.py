"""Executors of replay tasks: a process pool on this machine, or a Ray cluster."""
