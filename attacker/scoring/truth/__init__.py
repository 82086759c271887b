"""The truth that reconstructions are compared with: the examples that clients used, their data sets, and bounds on the error."""
