from ..cuda_triton import copy_blocks as launcher

run, unsupported = launcher.run, launcher.unsupported
