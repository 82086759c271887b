"""Worker process of the service: runs one job after the other, and exchanges JSON lines with the supervisor."""
