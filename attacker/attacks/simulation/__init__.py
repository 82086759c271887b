"""Simulation of what a client computes from a guess of its examples."""
