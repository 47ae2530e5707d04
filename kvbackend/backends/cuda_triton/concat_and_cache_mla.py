from ...ops import _formats
from . import launching, rows


def unsupported(ckv, **_):
    yield from launching.floats(ckv=ckv)


def run(ckv, kpe, ckv_cache, kpe_cache, slot_mapping, kv_format, k_scale, k_scale_cache):
    latents, rotary = _formats.latent(kv_format, ckv_cache, kpe_cache, k_scale, k_scale_cache)
    rows.write(latents, slot_mapping, ckv)
    rows.write(rotary, slot_mapping, kpe)
