from ..cuda_triton import compress_kv as launcher

run, unsupported = launcher.run, launcher.unsupported
