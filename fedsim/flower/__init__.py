"""Adapters to Flower: records and grids."""
