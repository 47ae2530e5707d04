"""kvbackend in Hugging Face transformers: a paged cache, and attention that runs through kvbackend's ops.

    from kvbackend.integrations.transformers import patch

    model = patch(AutoModelForCausalLM.from_pretrained(path), block_size=16)
    model.generate(**inputs)

`patch` is all that most callers need; `unpatch` takes it back. `PagedCache` and `new_cache` are for those who keep a
cache over several calls, `register` for those who choose the attention by its name, "kvbackend".
"""

from __future__ import annotations

try:
    import transformers as _transformers  # noqa: F401  (only to say what is missing)
except ImportError as error:
    raise ImportError(
        f"transformers cannot be imported ({error}); this integration needs it: "
        f"run `pip install 'transformers>=5.19,<5.25'`"
    ) from error

from .attention import NAME, register
from .cache import PagedCache, PagedLayer
from .patching import new_cache, patch, unpatch, unsupported
from .sparse import SparseCache
from .store import projections

__all__ = [
    "NAME",
    "PagedCache",
    "PagedLayer",
    "SparseCache",
    "new_cache",
    "patch",
    "projections",
    "register",
    "unpatch",
    "unsupported",
]
