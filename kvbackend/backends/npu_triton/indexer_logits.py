from ..cuda_triton import indexer_logits as launcher

run, unsupported = launcher.run, launcher.unsupported
