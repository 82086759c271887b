"""Differential privacy of noisy updates: noise and sensitivity, epsilon computed from them, and measured lower bounds.

Lower bounds on epsilon come from guesses about canaries: pairs of examples of which a client uses one, as a secret coin decides.
"""
