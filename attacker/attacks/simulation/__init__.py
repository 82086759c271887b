"""Simulation of a client: the gradient or update that it would compute from candidate examples."""
