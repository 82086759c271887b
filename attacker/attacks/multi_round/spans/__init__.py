"""Attacks that recover examples from updates of the input layer over many rounds: `spans`, and `cohort_spans` for secure sums.

The update [dW, db] = D^T [X, 1] of a layer z = W x + b is a sum of outer products over the examples x of the batch
(`layer_updates`), so that its row space (`row_space`) is the span of their vectors [x, 1], of length F. Examples follow from

- directions that the row spaces of several rounds share (`intersections`);
- zeros of D behind ReLU: rows of one example and the remaining examples of a batch (`relu_zeros`), and batches that several
  rounds share as a whole (`same_batch`);
- independent component analysis, for images (`components`).

`certainty` tells examples from mixtures, and labels them. `client_groups` groups what belongs to one client. `cohorts` isolates
the spans of single clients in secure sums. `attack` and `cohort_attack` apply all of this to a case.
"""
