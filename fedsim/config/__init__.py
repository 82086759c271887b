"""Configuration of an experiment."""
