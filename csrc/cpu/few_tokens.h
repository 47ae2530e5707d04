// Products of a few tokens with large weights: each weight is read once, and that is what takes the time.
#pragma once

#include "simd.h"

namespace kvbackend::KVBACKEND_ISA {

constexpr int64_t kStreams = 4;                       // rows of weights read side by side
constexpr int64_t kGroup = kAccumulators / kStreams;  // tokens that meet them at once
constexpr int64_t kPanel = 512;                       // the rows' length as floats in L1
constexpr int64_t kTokens = 32;                       // tokens that one pass over the weights serves

template <class T>
struct Weights {  // one head's weights [outputs, inputs]
  const T* data;
  int64_t outputs, inputs, output_stride, input_stride;
};

// One row of a panel as floats, filled up with zeros; the row that comes `ahead` elements later is asked for meanwhile.
template <class T>
inline void load_panel(const T* row, int64_t stride, int64_t size, int64_t ahead, float* out) {
  if (stride == 1) {
    for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(row + ahead + i);
  }
  load_row(row, stride, size, out);
  std::fill(out + size, out + round_up(size, kLanes), 0.0f);
}

// sums [tokens, kPanel] += x [tokens, x_stride] times the outputs begin .. end of w, at most kPanel. tokens is a
// multiple of kGroup, and rows of x end in zeros. For weights whose inputs follow each other: dot products in
// registers.
template <class T>
void multiply_by_outputs(const float* x, int64_t tokens, int64_t x_stride, const Weights<T>& w, int64_t begin,
                         int64_t end, float* sums) {
  float panel[kStreams][kPanel] = {};
  for (int64_t input = 0; input < w.inputs; input += kPanel) {
    const int64_t length = std::min(kPanel, w.inputs - input);
    for (int64_t output = begin; output < end; output += kStreams) {
      const int64_t streams = std::min(kStreams, end - output);
      const bool last = output + kStreams >= end;
      const int64_t ahead = last ? kPanel - (output - begin) * w.output_stride : kStreams * w.output_stride;
      for (int64_t s = 0; s < streams; ++s) {
        const T* row = w.data + (output + s) * w.output_stride + input * w.input_stride;
        load_panel(row, w.input_stride, length, ahead, panel[s]);
      }
      for (int64_t token = 0; token < tokens; token += kGroup) {
        Vec dots[kGroup][kStreams] = {};
        for (int64_t i = 0; i < length; i += kLanes) {
          for (int64_t t = 0; t < kGroup; ++t) {
            const Vec factors = load(x + (token + t) * x_stride + input + i);
            for (int64_t s = 0; s < kStreams; ++s) dots[t][s] += factors * load(panel[s] + i);
          }
        }
        for (int64_t t = 0; t < kGroup; ++t) {
          const Quad quad = sum_lanes(dots[t][0], dots[t][1], dots[t][2], dots[t][3]);
          for (int64_t s = 0; s < streams; ++s) sums[(token + t) * kPanel + output - begin + s] += quad[s];
        }
      }
    }
  }
}

// The same for weights whose outputs follow each other: kStreams inputs at a time are added to the sums of the tokens.
template <class T>
void multiply_by_inputs(const float* x, int64_t tokens, int64_t x_stride, const Weights<T>& w, int64_t begin,
                        int64_t end, float* sums) {
  float panel[kStreams][kPanel] = {};
  const int64_t length = end - begin;
  for (int64_t input = 0; input < w.inputs; input += kStreams) {
    for (int64_t s = 0; s < kStreams; ++s) {
      if (input + s < w.inputs) {
        const T* row = w.data + (input + s) * w.input_stride + begin * w.output_stride;
        load_panel(row, w.output_stride, length, kStreams * w.input_stride, panel[s]);
      } else {
        std::fill_n(panel[s], kPanel, 0.0f);
      }
    }
    for (int64_t token = 0; token < tokens; token += kGroup) {
      for (int64_t i = 0; i < length; i += kLanes) {
        for (int64_t t = 0; t < kGroup; ++t) {
          const float* factors = x + (token + t) * x_stride + input;
          float* row = sums + (token + t) * kPanel + i;
          Vec sum = load(row);
          for (int64_t s = 0; s < kStreams; ++s) sum += factors[s] * load(panel[s] + i);
          store(row, sum);
        }
      }
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
  const int64_t chunk = std::clamp<int64_t>((1 << 17) / bytes / kLanes * kLanes, kLanes, kPanel);
  const int64_t chunks = (outputs + chunk - 1) / chunk, stride = round_up(inputs, kLanes);
  const auto multiply = w_output == 1 && w_input != 1 ? multiply_by_inputs<T> : multiply_by_outputs<T>;
  for (int64_t first = 0; first < num_tokens; first += kTokens) {
    const int64_t tokens = std::min(kTokens, num_tokens - first), filled = round_up(tokens, kGroup);
    torch::stable::parallel_for(0, num_heads * chunks, grain(chunk * bytes), [&](int64_t from, int64_t to) {
      std::vector<float> rows(filled * stride), sums(filled * kPanel);  // a last group is filled up with zeros
      int64_t loaded = -1;
      for (int64_t item = from; item < to; ++item) {
        const int64_t head = item / chunks, begin = item % chunks * chunk, end = std::min(begin + chunk, outputs);
        if (head != loaded) {
          for (int64_t t = 0; t < tokens; ++t)
            load_row(data + (first + t) * x_token + head * x_head, x_input, inputs, rows.data() + t * stride);
          loaded = head;
        }
        std::fill(sums.begin(), sums.end(), 0.0f);
        const Weights<T> weights{w + head * w_head, outputs, inputs, w_output, w_input};
        multiply(rows.data(), filled, stride, weights, begin, end, sums.data());
        for (int64_t t = 0; t < tokens; ++t) {
          Out* row = out + ((first + t) * num_heads + head) * outputs + begin;
          store_row(sums.data() + t * kPanel, end - begin, row, 1);
        }
      }
    });
  }
}

}  // namespace kvbackend::KVBACKEND_ISA
