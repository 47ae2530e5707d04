from ..cuda_triton import mla_attention as launcher

run, unsupported = launcher.run, launcher.unsupported
