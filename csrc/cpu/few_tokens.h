// Products of a few tokens with large weights: each weight is read once, and that is what takes the time.
#pragma once

#include "kernel.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t STREAMS = 4;   // rows of weights read side by side: one stream does not fill a memory channel
constexpr int64_t PANEL = 512;   // their length as floats in L1
constexpr int64_t TOKENS = 32;   // tokens that one pass over the weights serves: their sums stay in L2

template <class T>
struct Weights {  // one head's weights [outputs, inputs]
  const T* data;
  int64_t outputs, inputs, output_stride, input_stride;
};

// sums [tokens, end - begin] = x [tokens, inputs] times the outputs begin .. end of w. Weights whose inputs follow each
// other: dot products of STREAMS outputs with each token.
template <class T>
void multiply_by_outputs(const float* x, int64_t tokens, const Weights<T>& w, int64_t begin, int64_t end, float* sums) {
  float panel[STREAMS][PANEL] = {};
  for (int64_t output = begin; output < end; output += STREAMS) {
    const int64_t streams = std::min(STREAMS, end - output);
    for (int64_t input = 0; input < w.inputs; input += PANEL) {
      const int64_t length = std::min(PANEL, w.inputs - input);
      for (int64_t s = 0; s < streams; ++s) {
        const T* row = w.data + (output + s) * w.output_stride + input * w.input_stride;
        load_row(row, w.input_stride, length, panel[s]);
      }
      for (int64_t token = 0; token < tokens; ++token) {
        const float* row = x + token * w.inputs + input;
        float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
        for (int64_t i = 0; i < length; ++i) {
          a += row[i] * panel[0][i];
          b += row[i] * panel[1][i];
          c += row[i] * panel[2][i];
          d += row[i] * panel[3][i];
        }
        const float dots[STREAMS] = {a, b, c, d};
        for (int64_t s = 0; s < streams; ++s) sums[token * (end - begin) + output - begin + s] += dots[s];
      }
    }
  }
}

// The same for weights whose outputs follow each other: STREAMS inputs at a time are added to all sums of each token.
// end - begin is at most PANEL.
template <class T>
void multiply_by_inputs(const float* x, int64_t tokens, const Weights<T>& w, int64_t begin, int64_t end, float* sums) {
  float panel[STREAMS][PANEL] = {};
  const int64_t length = end - begin;
  for (int64_t input = 0; input < w.inputs; input += STREAMS) {
    float factors[TOKENS][STREAMS] = {};
    for (int64_t s = 0; s < STREAMS; ++s) {
      if (input + s < w.inputs) {
        const T* row = w.data + (input + s) * w.input_stride + begin * w.output_stride;
        load_row(row, w.output_stride, length, panel[s]);
        for (int64_t token = 0; token < tokens; ++token) factors[token][s] = x[token * w.inputs + input + s];
      } else {
        std::fill_n(panel[s], length, 0.0f);
      }
    }
    for (int64_t token = 0; token < tokens; ++token) {
      const float a = factors[token][0], b = factors[token][1], c = factors[token][2], d = factors[token][3];
      float* row = sums + token * length;
#pragma omp simd
      for (int64_t i = 0; i < length; ++i)
        row[i] += a * panel[0][i] + b * panel[1][i] + c * panel[2][i] + d * panel[3][i];
    }
  }
}

// out[t, h, n] = sum over k of x[t, h, k] w[h, n, k], in float, rounded once. x [T, H, k], any strides; w as strides of
// heads, outputs and inputs; out [T, H, n] contiguous. Parallel over heads and chunks of their outputs.
template <class T, class Out>
void multiply_heads(const Tensor& x, const T* w, int64_t w_head, int64_t outputs, int64_t w_output, int64_t w_input,
                    Out* out) {
  const int64_t num_tokens = x.size(0), num_heads = x.size(1), inputs = x.size(2);
  const int64_t x_token = x.stride(0), x_head = x.stride(1), x_input = x.stride(2);
  const T* data = static_cast<const T*>(x.const_data_ptr());
  const int64_t bytes = std::max<int64_t>(1, inputs * static_cast<int64_t>(sizeof(T)));  // of one output's weights
  const int64_t chunk = std::clamp((1 << 17) / bytes / STREAMS * STREAMS, STREAMS, PANEL);
  const int64_t chunks = (outputs + chunk - 1) / chunk;
  const auto multiply = w_output == 1 && w_input != 1 ? multiply_by_inputs<T> : multiply_by_outputs<T>;
  for (int64_t first = 0; first < num_tokens; first += TOKENS) {
    const int64_t tokens = std::min(TOKENS, num_tokens - first);
    torch::stable::parallel_for(0, num_heads * chunks, grain(chunk * bytes), [&](int64_t from, int64_t to) {
      std::vector<float> rows(tokens * inputs), sums(tokens * chunk);
      int64_t loaded = -1;
      for (int64_t item = from; item < to; ++item) {
        const int64_t head = item / chunks, begin = item % chunks * chunk, end = std::min(begin + chunk, outputs);
        if (head != loaded) {
          for (int64_t t = 0; t < tokens; ++t)
            load_row(data + (first + t) * x_token + head * x_head, x_input, inputs, rows.data() + t * inputs);
          loaded = head;
        }
        std::fill(sums.begin(), sums.end(), 0.0f);
        multiply(rows.data(), tokens, {w + head * w_head, outputs, inputs, w_output, w_input}, begin, end, sums.data());
        for (int64_t t = 0; t < tokens; ++t)
          store_row(sums.data() + t * (end - begin), end - begin,
                    out + ((first + t) * num_heads + head) * outputs + begin, 1);
      }
    });
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
