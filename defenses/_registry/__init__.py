"""Lookup of what users name: registries, specification strings, and code named as `module:function`.

Defenses, models, data sets, partitions, decoders and attacks use it.
"""

from defenses._registry.choice import Choice
from defenses._registry.registry import Registry, bind_arguments, read_source, read_summary, suggest_name

__all__ = ["Choice", "Registry", "bind_arguments", "read_source", "read_summary", "suggest_name"]
