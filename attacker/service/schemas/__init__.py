"""Types of the API's responses, from which its OpenAPI document is made, one module for each subject.

Scores, originals and true labels are null if the service was given no truth (which examples each client trained on).

A case is the observations that are attacked together: one round of a client, or several. A null is the same attack without the
client's update, for comparison: it reconstructs what its prior alone gives.
"""
