"""Secure aggregation without a framework: secret sharing, masks, participants and the aggregator."""
