"""Building blocks of the codecs: bit packing, tables of repeated values, and encoded positions."""
