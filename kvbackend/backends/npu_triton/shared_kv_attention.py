from ..cuda_triton import shared_kv_attention as launcher

run, unsupported = launcher.run, launcher.unsupported
