"""Whole attention layers of DeepSeek's sparse models, built from kvbackend's ops and ordinary linear layers.

They are what an engine's author would copy from: plain torch modules over kvbackend's caches, with varlen batches of
prefill, chunked prefill and decode. Run them under `torch.no_grad()`: the ops have no gradient formula.
"""

from ._parts import SharedKvConfig
from .deepseek_v4 import DeepseekV4Attention
from .deepseek_v32 import DeepseekV32Attention, DsaConfig
from .deepseek_v41 import DeepseekV41Attention, Role, Selection, roles

__all__ = [
    "DeepseekV4Attention",
    "DeepseekV32Attention",
    "DeepseekV41Attention",
    "DsaConfig",
    "Role",
    "Selection",
    "SharedKvConfig",
    "roles",
]
