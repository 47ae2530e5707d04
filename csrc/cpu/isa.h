// What this CPU can do, as far as the kernels care. No torch: the pybind11 module includes it too.
#pragma once

namespace kvbackend {

struct CpuFeatures {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx512_bf16 = false;
  bool avx512_vbmi = false;
  bool avx512_fp16 = false;
  bool gfni = false;
  bool amx_bf16 = false;  // as the CPU reports it; the kernel must also grant the tiles
  bool amx_int8 = false;
};

inline CpuFeatures cpu_features() {
  CpuFeatures cpu;
#if defined(__x86_64__)
  __builtin_cpu_init();
  cpu.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  cpu.avx512 = cpu.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  cpu.avx512_bf16 = cpu.avx512 && __builtin_cpu_supports("avx512bf16");
  cpu.avx512_vbmi = cpu.avx512 && __builtin_cpu_supports("avx512vbmi");
  cpu.gfni = cpu.avx512 && __builtin_cpu_supports("gfni");
  unsigned a = 7, b = 0, c = 0, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  cpu.avx512_fp16 = cpu.avx512 && (d >> 23 & 1);
  cpu.amx_bf16 = cpu.avx512 && (d >> 22 & 1);
  cpu.amx_int8 = cpu.avx512 && (d >> 25 & 1);
#endif
  return cpu;
}

}  // namespace kvbackend
