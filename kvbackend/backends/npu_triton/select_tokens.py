from ..cuda_triton import select_tokens as launcher

run, unsupported = launcher.run, launcher.unsupported
