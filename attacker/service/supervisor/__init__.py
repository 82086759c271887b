"""Supervisor of the service: starts worker processes, hands them jobs, and restarts what died."""
