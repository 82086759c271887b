"""The codecs `sparse`, `bits` and `levels`, which pack updates for the wire, and their building blocks."""
