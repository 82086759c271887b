"""Worker process of the service: executes one job after the other, and talks to the supervisor in JSON lines."""
