"""The client's side: its Flower app, and a mod for the apps of others."""

from fedsim.client.mod import update_mod

__all__ = ["update_mod"]
