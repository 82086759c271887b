"""A wide layer with random Gaussian weights before the last layer (Liu et al. 2024, "Data reconstruction attacks and defenses").

A server adds it so that the gradient of the last layer reveals the layer's inputs, the features of a batch's examples (section
4.2 and appendix F of the paper). Here all weights of the layer are random. The paper draws only some at random, and trains the
others.
"""

from torch import Tensor, nn


class WideHead(nn.Module):
    """A linear layer without a bias whose weights are normally distributed, ReLU, and a linear layer that returns the logits.

    features: number of inputs. neurons: outputs of the first layer. The variance of its weights is 2 / features (He et al. 2015).
    """

    def __init__(self, features: int, num_classes: int, *, neurons: int) -> None:
        super().__init__()
        self.widen = nn.Linear(features, neurons, bias=False)
        self.activation = nn.ReLU()
        self.classify = nn.Linear(neurons, num_classes)
        nn.init.normal_(self.widen.weight, std=(2 / features) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classify(self.activation(self.widen(x)))
        return out
