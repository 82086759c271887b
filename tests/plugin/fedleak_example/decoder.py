"""A decoder, the map from the variables that a search optimises to examples."""

from torch.nn.functional import avg_pool2d, interpolate

from attacker.attacks.matching.decoders import Decoder
from fedsim.recording import DataSpec


def blocks(data: DataSpec) -> Decoder:
    """Return a decoder to images of blocks of 2x2 equal pixels."""
    if not data.is_image or data.shape[1] % 2 or data.shape[2] % 2:
        raise ValueError(f"blocks: the examples must be images of even height and width, got shape {data.shape}")
    channels, height, width = data.shape
    return Decoder(
        (channels, height // 2, width // 2),
        decode=lambda z: interpolate(z, scale_factor=2, mode="nearest"),
        encode=lambda x: avg_pool2d(x, 2),
        project=lambda z: z.clamp(0, 1),
    )
