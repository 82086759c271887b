"""A federation of separate processes: keys, commands, and the same on one machine. Flower is started, not imported."""
