"""The truth that reconstructions are compared with: the examples that clients used, and the data sets that hold them."""
