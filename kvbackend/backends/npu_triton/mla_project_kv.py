from ..cuda_triton import mla_project_kv as launcher

run, unsupported = launcher.run, launcher.unsupported
