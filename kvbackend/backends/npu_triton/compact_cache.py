from ..cuda_triton import compact_cache as launcher

run, unsupported = launcher.run, launcher.unsupported
