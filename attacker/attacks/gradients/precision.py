"""Selection of a reduced floating-point precision for devices on which it makes a search faster."""

import torch

CPU_FEATURES = ("avx512_bf16", "amx_bf16")


def fast(device: str) -> torch.dtype | None:
    """Return bfloat16 if the device multiplies it faster than float32, else None."""
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    able = torch.cpu.get_capabilities() if device == "cpu" else {}
    return torch.bfloat16 if any(able.get(name) for name in CPU_FEATURES) else None
