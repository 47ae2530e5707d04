// Loops at this machine's limits: they only read, or only multiply. `kvbackend bench` holds the kernels against them
// (kvbackend/bench/limits.py calls them by their C names; they are no ops).
#include <numeric>

#include "simd.h"
#if defined(__AVX512BF16__)
#include "amx.h"
#endif

namespace kvbackend::KVBACKEND_ISA {

// Reads rows of row_bytes (a multiple of 64) at these offsets, four at a time: one stream does not fill a core.
extern float probe_read(const char* pool, const int64_t* offsets, int64_t count, int64_t row_bytes) {
  constexpr int kStreams = 4;
  constexpr int64_t kLine = 64;
  std::vector<float> sums(count / kStreams);
  torch::stable::parallel_for(0, count / kStreams, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Vec sum[kStreams] = {};
      for (int64_t at = 0; at < row_bytes; at += kLine) {
        for (int stream = 0; stream < kStreams; ++stream) {
          const auto* line = reinterpret_cast<const float*>(pool + offsets[i * kStreams + stream] + at);
          for (int64_t part = 0; part < kLine / 4; part += kLanes) sum[stream] += load(line + part);
        }
      }
      const Vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
      for (int lane = 0; lane < kLanes; ++lane) sums[i] += all[lane];
    }
  });
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

// Multiplies and adds in registers, `rounds` times on each thread; the number of operations of them all.
extern double probe_multiply(int64_t rounds, int64_t threads) {
  std::vector<float> kept(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      Vec sums[kManySums];
      for (int i = 0; i < kManySums; ++i) sums[i] = broadcast(static_cast<float>(i));  // alike, they would be one
      const Vec x = broadcast(0.5f), y = broadcast(static_cast<float>(thread));
      for (int64_t round = 0; round < rounds; ++round)
        for (Vec& sum : sums) sum = sum * x + y;
      for (const Vec& sum : sums) kept[thread] += sum[0];
    }
  });
  return 2.0 * rounds * threads * kManySums * kLanes;
}

#if defined(__AVX512BF16__)
double multiply_tiles(int64_t rounds) {
  const TileScope tiles;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  for (int64_t round = 0; round < rounds; ++round) {
    tile_multiply<0, 4, 6>(), tile_multiply<1, 4, 7>(), tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
  }
  return 4.0 * 2 * kSide * kSide * kDepth * rounds;
}

double multiply_vectors(int64_t rounds, float& kept) {
  Vec sums[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) sums[i] = broadcast(static_cast<float>(i));  // alike, they would be one
  const __m512bh half = (__m512bh)_mm512_set1_epi32(0x3f003f00);                       // in each number
  for (int64_t round = 0; round < rounds; ++round)
    for (Vec& sum : sums) sum = (Vec)_mm512_dpbf16_ps((__m512)sum, half, half);
  for (const Vec& sum : sums) kept += sum[0];
  return 2.0 * 2 * kLanes * kAccumulators * rounds;
}

// Products of bfloat16 matrices, as attention makes them.
extern double probe_products(int64_t rounds, int64_t threads) {
  std::vector<float> kept(threads);
  std::vector<double> done(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      done[i] = has_tiles() ? multiply_tiles(rounds) : multiply_vectors(4 * rounds, kept[i]);
  });
  return std::accumulate(done.begin(), done.end(), 0.0);
}
#endif

}  // namespace kvbackend::KVBACKEND_ISA

#if defined(KVBACKEND_REGISTERS)
KVBACKEND_DECLARE_VARIANTS(probe_read)
KVBACKEND_DECLARE_VARIANTS(probe_multiply)
KVBACKEND_IF_AVX512(namespace kvbackend::avx512_bf16 { extern double probe_products(int64_t rounds, int64_t threads); })
#define KVBACKEND_ADDRESS(variant, name) &kvbackend::variant::name
#define KVBACKEND_EXPORT extern "C" __attribute__((visibility("default")))

KVBACKEND_EXPORT float kvbackend_probe_read(const char* pool, const int64_t* offsets, int64_t count,
                                            int64_t row_bytes) {
  return (KVBACKEND_CHOSEN(KVBACKEND_ADDRESS, probe_read))(pool, offsets, count, row_bytes);
}

KVBACKEND_EXPORT double kvbackend_probe_multiply(int64_t rounds, int64_t threads) {
  return (KVBACKEND_CHOSEN(KVBACKEND_ADDRESS, probe_multiply))(rounds, threads);
}

// 0 operations where the kernels multiply no bfloat16.
KVBACKEND_EXPORT double kvbackend_probe_products(int64_t rounds, int64_t threads) {
#if defined(KVBACKEND_AVX512)
  if (kvbackend::isa() >= kvbackend::Isa::avx512_bf16) return kvbackend::avx512_bf16::probe_products(rounds, threads);
#endif
  return 0;
}
#endif

KVBACKEND_PART_BF16
