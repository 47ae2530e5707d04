"""What the kernels of each op take in calls of production size: the most of any target, none of which spills.

Written by `ci/cuda_compile.sh --write`, which also compares it with what it compiles.
"""

# op -> registers of a thread, KiB of shared memory of a block
MOST: dict[str, tuple[int, int]] = {
    "accumulate_scores": (151, 32),
    "apply_rope": (116, 0),
    "candidate_blocks": (146, 32),
    "compact_cache": (40, 0),
    "compress_kv": (128, 8),
    "concat_and_cache_mla": (50, 0),
    "copy_blocks": (20, 0),
    "dequantize_kv": (60, 4),
    "gather_cache": (58, 4),
    "indexer_logits": (161, 32),
    "lightning_indexer": (151, 32),
    "merge_attn_states": (56, 0),
    "mla_attention": (254, 209),
    "mla_project_kv": (30, 0),
    "page_logits": (112, 36),
    "paged_attention": (255, 97),
    "quantize_kv": (51, 1),
    "reshape_and_cache": (62, 1),
    "select_tokens": (71, 8),
    "shared_kv_attention": (251, 96),
    "sparse_attention": (166, 38),
    "sparse_mla_attention": (255, 209),
    "store_rows": (60, 1),
    "swap_blocks": (20, 0),
    "token_logits": (64, 20),
    "topk_indices": (206, 8),
    "transcode": (40, 0),
}
