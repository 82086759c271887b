"""Supervisor of the service's worker processes: starts them, gives them jobs, and replaces those that died."""
