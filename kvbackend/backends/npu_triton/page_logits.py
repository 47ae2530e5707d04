from ..cuda_triton import page_logits as launcher

run, unsupported = launcher.run, launcher.unsupported
