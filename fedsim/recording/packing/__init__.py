"""Building blocks of the codecs, which pack updates for the wire: bit packing, tables of values, and encoded positions."""
