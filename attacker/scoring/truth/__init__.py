"""What reconstructions are scored against: the true examples that clients used, their data sets, and bounds at these examples.

The bounds are lower bounds on the expected mean squared error of a reconstruction, computed at the true examples (`CaseBounds`).
"""
