// The kernels of a library that can be called past torch's dispatcher.
#pragma once

#include <vector>

#include "entries.h"

namespace kvbackend {

std::vector<DirectOp>& direct_ops();  // direct.cpp

// Tells torch's dispatcher, and who calls past it, which kernel an op has.
template <auto kernel, class Library>
void implement(Library& library, const char* op) {
  library.impl(op, &Boxed<kernel>::call);
  direct_ops().push_back({op, &Direct<kernel>::call, Direct<kernel>::kArguments, Direct<kernel>::kResults});
}

}  // namespace kvbackend
