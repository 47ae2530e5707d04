// Rows of one record as rows of another: what moves where, and the kernel that moves it. Nothing of torch in it and no
// launch, so that tests/cuda runs it as C++.
#pragma once

#include "../common/records.h"
#include "runs.h"

namespace kvbackend::cuda {

// A stretch of bytes of every row, or of every page, of the target.
struct Piece {
  enum Kind { copied, zero, widened };  // widened: powers of two as bytes become bfloat16

  Kind kind;
  int64_t rows;            // of a page: its rows, or 1 for what a page has once
  int64_t from, from_row;  // first byte in a page, and bytes from row to row
  int64_t to, to_row;
  int64_t bytes;  // of the target, in each row
  int64_t unit;   // bytes that move at once
  int lanes;      // threads of a row, a power of two
};

constexpr int kPieces = 8;  // of a record's fields, gaps and the end of a page: more than any

struct Pieces {
  Piece each[kPieces];
  int count = 0;
};

// What makes pages of `target` out of pages of `source`; false where a field has no counterpart. page_stride: bytes
// from page to page of the source. Both must start at a multiple of 16.
inline bool plan(const Record& source, const Record& target, int64_t block_size, int64_t page_stride, Pieces& pieces) {
  const int64_t page_bytes = target.page_bytes(block_size);
  const auto add = [&](Piece piece) {
    if (piece.bytes == 0) return;
    std::vector<int64_t> numbers{piece.bytes, piece.to, piece.to_row, page_bytes};
    if (piece.kind == Piece::copied) numbers.insert(numbers.end(), {piece.from, piece.from_row, page_stride});
    piece.unit = piece.kind == Piece::widened ? 2 : unit_of(numbers);
    for (piece.lanes = 1; piece.lanes < 32 && piece.lanes * piece.unit < piece.bytes;) piece.lanes *= 2;
    pieces.each[pieces.count++] = piece;
  };
  for (int64_t plane = 0; plane < 2; ++plane) {
    const int64_t start = target.start(block_size, 0, plane), row = target.plane_bytes[plane];
    int64_t filled = 0;  // bytes of the row that have a piece, from its start on
    while (filled < row) {
      const Field* next = nullptr;  // the field that follows
      for (const Field& field : target.fields) {
        if (field.bytes && field.plane == plane && field.offset >= filled && (!next || field.offset < next->offset)) {
          next = &field;
        }
      }
      const int64_t gap = (next ? next->offset : row) - filled;
      add({Piece::zero, block_size, 0, 0, start + filled, row, gap, 1, 1});
      filled += gap;
      if (!next) break;
      const Field* found = source.field(next->name);
      const bool widens = found && found->holds("float8_e8m0fnu") && next->holds("bfloat16");
      if (!found || found->bytes * (widens ? 2 : 1) != next->bytes) return false;
      add({widens ? Piece::widened : Piece::copied, block_size,
           source.start(block_size, 0, found->plane) + found->offset, source.plane_bytes[found->plane], start + filled,
           row, next->bytes, 1, 1});
      filled += next->bytes;
    }
  }
  const int64_t used = block_size * target.row_bytes();
  add({Piece::zero, 1, 0, 0, used, 0, page_bytes - used, 1, 1});
  return true;
}

// The bfloat16 of the power of two that a byte stands for; 255 is NaN, and 0 a subnormal.
__device__ inline uint16_t widen(uint8_t exponent) {
  return exponent == 255 ? 0x7fc0 : exponent == 0 ? 0x0040 : uint16_t(exponent << 7);
}

template <class Unit>
__device__ inline void move_units(const uint8_t* from, uint8_t* to, const Piece& piece, int lane) {
  for (int64_t at = lane * int64_t(sizeof(Unit)); at < piece.bytes; at += piece.lanes * int64_t(sizeof(Unit))) {
    *reinterpret_cast<Unit*>(to + at) = piece.kind == Piece::zero ? Unit{} : *reinterpret_cast<const Unit*>(from + at);
  }
}

// Grid: x over rows of all pages, `lanes` threads for each; y over pieces.
__global__ void __launch_bounds__(256) move_rows(const uint8_t* pages, uint8_t* out, Pieces pieces, uint32_t num_pages,
                                                 int64_t page_stride, int64_t page_bytes) {
  const Piece& piece = pieces.each[blockIdx.y];
  const uint32_t thread = blockIdx.x * 256 + threadIdx.x, row_of_all = thread / piece.lanes;
  const uint32_t page = row_of_all / uint32_t(piece.rows), row = row_of_all % uint32_t(piece.rows);
  if (page >= num_pages) return;
  const int lane = thread % piece.lanes;
  const uint8_t* from = pages + page * page_stride + piece.from + row * piece.from_row;
  uint8_t* to = out + page * page_bytes + piece.to + row * piece.to_row;
  if (piece.kind == Piece::widened) {
    for (int64_t i = lane; 2 * i < piece.bytes; i += piece.lanes) {
      const uint16_t scale = widen(from[i]);  // the target may lie at an odd byte
      to[2 * i] = uint8_t(scale), to[2 * i + 1] = uint8_t(scale >> 8);
    }
    return;
  }
  switch (piece.unit) {
    case 16:
      return move_units<uint4>(from, to, piece, lane);
    case 8:
      return move_units<uint2>(from, to, piece, lane);
    case 4:
      return move_units<uint32_t>(from, to, piece, lane);
    case 2:
      return move_units<uint16_t>(from, to, piece, lane);
    default:
      return move_units<uint8_t>(from, to, piece, lane);
  }
}

// Blocks in x that the largest piece of some pages wants.
inline uint32_t blocks_of(const Pieces& pieces, int64_t num_pages) {
  int64_t threads = 0;
  for (int i = 0; i < pieces.count; ++i) {
    threads = std::max(threads, num_pages * pieces.each[i].rows * pieces.each[i].lanes);
  }
  return uint32_t((threads + 255) / 256);
}

}  // namespace kvbackend::cuda
