// The pybind11 module kvbackend._build: facts about this build and this CPU, and calls past torch's dispatcher. It is
// not linked to torch.
#include "cpu/isa.h"
#include "direct_call.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["compiler"] = __VERSION__;
  info["torch"] = KVBACKEND_BUILT_WITH_TORCH;
  info["torch_target"] = "2.10";
  info["libraries"] = KVBACKEND_BUILT_LIBRARIES;
  return info;
}

py::dict cpu_features() {
  const kvbackend::CpuFeatures cpu = kvbackend::cpu_features();
  py::dict features;
  features["avx2"] = cpu.avx2;
  features["avx512"] = cpu.avx512;
  features["avx512_bf16"] = cpu.avx512_bf16;
  features["avx512_vbmi"] = cpu.avx512_vbmi;
  features["avx512_fp16"] = cpu.avx512_fp16;
  features["gfni"] = cpu.gfni;
  features["amx_bf16"] = cpu.amx_bf16;
  features["amx_int8"] = cpu.amx_int8;
  return features;
}

}  // namespace

PYBIND11_MODULE(_build, m) {
  m.doc() = "Facts about how kvbackend was built and what this CPU can do.";
  m.def("build_info", &build_info, "Compiler, torch at build time, oldest torch that the libraries serve, libraries.");
  m.def("cpu_features", &cpu_features, "Instruction sets of this CPU that kernels may use.");
  m.def("direct_call", &kvbackend::direct_call, "A callable of an op that goes past torch's dispatcher, or None.");
}
