from ..cuda_triton import sparse_mla_attention as launcher

run, unsupported = launcher.run, launcher.unsupported
