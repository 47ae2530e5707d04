from ..cuda_triton import lightning_indexer as launcher

run, unsupported = launcher.run, launcher.unsupported
