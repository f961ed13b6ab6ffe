"""Linear layers on the CPU with weights laid out once for oneDNN, instead of at every call.

Takes the place of `torch.nn.Linear` in a loaded model; the numbers differ by rounding only. At
one row a product takes about half the time, since reading the weights is all there is to it.

Must not know: which model the layers belong to.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """`x @ weight.T + bias` for x of any leading shape."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        # A plain attribute, not a parameter: its layout is oneDNN's own, so nothing may move,
        # convert or save it as if it were an ordinary tensor.
        self.packed: Any = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (…, in_features); the result: (…, out_features)."""
        out = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return cast("torch.Tensor", out)


def usable(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packing pays here."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES:
        return False
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def pack(model: nn.Module) -> int:
    """Replace every plain linear layer below `model`; how many. Their own weights are dropped."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:  # a subclass may do more than multiply
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
