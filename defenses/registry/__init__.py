"""Lookup of what users name: registries, specification strings, and code named as `module:function`.

The registries hold defenses, models, data sets, attacks and whatever else has names in an experiment.
"""

from defenses.registry.choice import Choice
from defenses.registry.registry import Registry, bind_arguments, read_source, read_summary, suggest_name

__all__ = ["Choice", "Registry", "bind_arguments", "read_source", "read_summary", "suggest_name"]
