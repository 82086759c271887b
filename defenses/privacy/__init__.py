"""Differential privacy of noisy updates: noise and sensitivity, epsilon computed from them, and tests that bound it from below.

The tests guess about canaries: pairs of examples of which a client uses one, as a secret coin decides.
"""
