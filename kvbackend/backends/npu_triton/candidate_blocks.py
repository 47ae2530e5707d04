from ..cuda_triton import candidate_blocks as launcher

run, unsupported = launcher.run, launcher.unsupported
