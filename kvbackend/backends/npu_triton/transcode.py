from ..cuda_triton import transcode as launcher

run, unsupported = launcher.run, launcher.unsupported
