"""Closed-form attacks: they compute inputs of layers from gradients, instead of searching for examples with a given gradient.

The attack `exact` (`attack`, class `ClosedForm`) tries the closed forms in `routes` in turn, checks the answers by their gradient
(`routing`), and may search if none is exact. `warm_start` lets any search begin at such an answer. The closed forms, by route:

- linear: the inputs of a first linear layer, of one example or a batch (`linear`, and `patches` for a patch embedding).
- layers: the input of each layer by linear equations, from the last layer to the first (`rgap`). `rank` says from the
  architecture whether these determine the input.
- peeled: the same, with the equations of several layers together where one layer has too few (`peeling`).
- features: the features of each example from the last layer, inverted separately (`features`).
- layer_input: the input of a hidden linear layer, inverted (`layer_input`).

Other attacks of this package: `hybrid` (H-GAP), `cocktail` (independent components) and `imprint` (layers a server has planted).
"""
