"""Differential privacy of noisy updates: epsilon computed from noise and sensitivity, and tests that bound epsilon from below.

The tests guess about canaries: pairs of examples of which a client uses one, as a secret coin decides.
"""
