// A call past torch's dispatcher: what csrc/module.cpp hands to a library, and what it gets back. Nothing of torch or
// Python in it.
#pragma once

#include <cstdint>

namespace kvbackend {

struct ElementType {  // as DLPack has it: a DLDataTypeCode, and bits
  uint8_t code, bits;

  bool operator==(const ElementType& other) const { return code == other.code && bits == other.bits; }
};

// A tensor in this process's memory. Sizes and strides (in elements) lie where its owner has them.
struct Array {
  void* data;
  const int64_t *sizes, *strides;
  int32_t dim;
  ElementType dtype;
};

union Value {          // of an argument, as the op's schema says which
  const Array* array;  // nullptr: None
  int64_t integer;     // of a bool too
  double number;
  const char* text;
};

struct Result {  // the receiver ends it with release(owner)
  Array array;
  void* owner;
};

// A kernel's way in. Arguments in the order of the schema; results are written to `results`. False where the kernel
// refused the call; then nothing is to be released, and the same call through torch tells why.
using Entry = bool (*)(const Value* arguments, Result* results);

struct DirectOp {
  const char* name;
  Entry entry;
  int arguments, results;
};

struct DirectOps {
  const DirectOp* ops;
  int64_t count;
  void (*release)(void* owner);
};

}  // namespace kvbackend
