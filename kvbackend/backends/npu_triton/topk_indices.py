from ..cuda_triton import topk_indices as launcher

run, unsupported = launcher.run, launcher.unsupported
