// Pages of one record as pages of another: bytes in another order.
#include "codes.h"
#include "records.h"

namespace kvbackend::KVBACKEND_ISA {

// One field of a row: copied, or scales of powers of two made bfloat16.
struct Move {
  int64_t from_plane, from, to_plane, to, bytes;  // bytes of the source
  bool widens;

  void operator()(const uint8_t* source, uint8_t* target) const {
    if (!widens) {
      std::memcpy(target + to, source + from, bytes);
      return;
    }
    for (int64_t i = 0; i < bytes; ++i) {
      const bf16 scale = from_float<bf16>(to_float(e8m0{source[from + i]}));
      std::memcpy(target + to + i * sizeof scale, &scale, sizeof scale);
    }
  }
};

// Parallel over rows of pages; each row of the target is written once, its padding with zeros first.
Tensor transcode(const Tensor& pages, const std::string& from_layout, const std::string& to_layout,
                 int64_t block_size) {
  const Record &source = record_named(from_layout, "from_layout"), &target = record_named(to_layout, "to_layout");
  KVBACKEND_CHECK(block_size > 0, "block_size is ", block_size, "; a page holds 1 row or more: pass the rows of one");
  expect_rank(pages, "pages", 2);
  expect_dtype(pages, "pages", ScalarType::Byte);
  const int64_t num_blocks = pages.size(0), page_bytes = target.page_bytes(block_size);
  expect_shape(pages, "pages", {num_blocks, source.page_bytes(block_size)});
  KVBACKEND_CHECK(pages.stride(1) == 1, "pages has bytes ", pages.stride(1),
                  " apart; the CPU kernel takes pages that are dense: make it contiguous");
  std::vector<Move> moves;
  int64_t kept[2] = {};
  for (const Field& wanted : target.fields) {
    if (!wanted.bytes) continue;
    const Field* found = source.field(wanted.name);
    const bool widens = found && !std::strcmp(found->dtype, "float8_e8m0fnu") && !std::strcmp(wanted.dtype, "bfloat16");
    KVBACKEND_CHECK(found && found->bytes * (widens ? 2 : 1) == wanted.bytes, "to_layout is '", to_layout, "'; '",
                    from_layout, "' has other ", wanted.name, ": code the rows again");
    moves.push_back({found->plane, found->offset, wanted.plane, wanted.offset, found->bytes, widens});
    kept[wanted.plane] += wanted.bytes;
  }
  const bool padded[2] = {kept[0] != target.plane_bytes[0], kept[1] != target.plane_bytes[1]};
  const int64_t filled = block_size * target.row_bytes(), page_stride = pages.stride(0);
  Tensor out = new_result(pages, {num_blocks, page_bytes});
  const uint8_t* from = static_cast<const uint8_t*>(pages.const_data_ptr());
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  torch::stable::parallel_for(0, num_blocks * block_size, grain(target.row_bytes()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / block_size, row = i % block_size;
      const uint8_t* page = from + block * page_stride;
      uint8_t* written = to + block * page_bytes;
      for (int64_t plane = 0; plane < 2; ++plane) {
        if (padded[plane]) std::memset(written + target.start(block_size, row, plane), 0, target.plane_bytes[plane]);
      }
      for (const Move& move : moves) {
        move(page + source.start(block_size, row, move.from_plane),
             written + target.start(block_size, row, move.to_plane));
      }
      if (row + 1 == block_size) std::memset(written + filled, 0, page_bytes - filled);
    }
  });
  return out;
}

}  // namespace kvbackend::KVBACKEND_ISA

KVBACKEND_REGISTER(transcode)
