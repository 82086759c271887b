"""Loader of the public images that clients mix into their own examples for the defense InstaHide."""

from torch import Tensor

from defenses.inputs import InputsSpec, PublicPool
from fedsim import data as datasets


class _Images:
    """Sequence of the images of `examples`, without labels.

    Indexing it with a tensor of integers (n,) gives a tensor (n, *shape), float32 in [0, 1].
    """

    def __init__(self, examples: datasets.Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, indices: Tensor) -> Tensor:
        return self.examples[indices.numpy()][0]


def load_public_images(inputs: InputsSpec, data: datasets.Dataset) -> PublicPool | None:
    """Return the public images that the defense `inputs` mixes in; None if it uses none.

    The result is the training images of the data set that the defense names. Indexing the result with integers (n,) gives a
    tensor of images.
    Raises ValueError if the images have another shape than the examples of `data`, the clients' data, or if both data sets have
    the same training examples.
    """
    mixing = inputs.build()
    if mixing is None or not mixing.public:
        return None
    public = datasets.load_text(mixing.public)
    if public.spec.shape != data.spec.shape:
        raise ValueError(
            f"inputs: examples of public = {mixing.public!r} have shape {public.spec.shape}, but the clients' have "
            f"{data.spec.shape}; set public to a data set of that shape"
        )
    if public.compute_hash() == data.compute_hash():
        raise ValueError(
            f"inputs: public = {mixing.public!r} is the data set that the clients train on; set public to another one"
        )
    return _Images(public.train)
