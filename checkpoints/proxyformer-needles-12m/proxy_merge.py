"""Several neighbouring proxies into one, for coarser proxies of older history (ProxyFormer, Section 3.6)."""

import torch
from torch import nn


class ProxyMerge(nn.Module):
    """A linear map of `group` neighbours to one proxy.

    Args:
        group: neighbours that become one.
        d: width of the proxies.

    Attributes:
        proj: its `init_average` asks the model's initialisation for the average: weight `[I, …, I] / group`.

    Raises:
        ValueError: a group below 1.
    """

    def __init__(self, group: int, d: int) -> None:
        super().__init__()
        if group < 1:
            raise ValueError(f"group must be at least 1, got {group}.")
        self.group = group
        self.d = d
        self.proj = nn.Linear(group * d, d, bias=False)
        self.proj.init_average = True  # type: ignore[assignment]

    def average_weight(self) -> torch.Tensor:
        """The weight `(d, group · d)` with which the merged proxy is the average of its group."""
        return torch.eye(self.d, device=self.proj.weight.device, dtype=self.proj.weight.dtype).repeat(
            1, self.group
        ) / (self.group)

    def forward(self, proxies: torch.Tensor) -> torch.Tensor:
        """Merge proxies.

        Args:
            proxies: `(…, m, d)`.

        Returns:
            `(…, m / group, d)`.

        Raises:
            ValueError: another width, or a number of proxies that is not a multiple of the group.
        """
        if proxies.ndim < 2 or proxies.shape[-1] != self.d or proxies.shape[-2] % self.group:
            raise ValueError(
                f"Merging {self.group} proxies reads (…, a multiple of {self.group}, {self.d}), got shape "
                f"{tuple(proxies.shape)}."
            )
        return self.proj(proxies.unflatten(-2, (-1, self.group)).flatten(-2))
