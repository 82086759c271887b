"""Supervisor of the service's worker processes: starts and stops them, gives them jobs, and stores how the jobs end."""
