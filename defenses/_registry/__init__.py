"""Names that users give: registries, specification strings, and code named as `module:function`.

Shared by defenses, models, data sets, partitions, decoders and attacks.
"""

from defenses._registry.choice import Choice
from defenses._registry.registry import Registry, bind_arguments, read_source, read_summary, suggest_name

__all__ = ["Choice", "Registry", "bind_arguments", "read_source", "read_summary", "suggest_name"]
