"""What the tests of codecs and of records share."""

from __future__ import annotations

import torch

from kvbackend import formats
from kvbackend.codecs import decode, encode, global_scale_of


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def global_scale(name: str, x: torch.Tensor) -> torch.Tensor | None:
    return global_scale_of(x) if formats.get(name).global_scale else None


def there_and_back(x: torch.Tensor, name: str, role: str = "key", **how) -> torch.Tensor:
    g = global_scale(name, x)
    return decode(*encode(x, name, role, g, **how), name, role, g)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
