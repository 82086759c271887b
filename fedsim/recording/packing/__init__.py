"""What the codecs are made of: bits, tables of few values, and positions."""
