from ..cuda_triton import swap_blocks as launcher

run, unsupported = launcher.run, launcher.unsupported
