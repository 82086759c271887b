"""Closed forms of networks in which one layer lacks equations."""
