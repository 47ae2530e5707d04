"""What a KV cache costs and what fits, exactly: formats x attention kinds x memory. Standard library only."""

from __future__ import annotations

from .planning import Plan, plan

__all__ = ["Plan", "plan"]
