"""Building blocks of codecs: bit packing, tables of few values, and positions."""
