"""RMSNorm whose weight follows its input's dtype."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, with one fused kernel under autocast too.

    There a projection's output is bfloat16 and the weight float32, which torch's own norm answers with several
    kernels, a float32 result and a warning. The mean is in float32 or better either way.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; the result has the dtype of `x`."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
