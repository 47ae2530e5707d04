// Records by name.
#pragma once

#include "../common/records.h"
#include "simd.h"

namespace kvbackend::KVBACKEND_ISA {

inline const Record& record_named(const std::string& name, const char* argument) {
  const Record* found = find_record(name.c_str());
  KVBACKEND_CHECK(found, argument, " is '", name, "'; it must be a record of kvbackend.formats: choose one");
  return *found;
}

}  // namespace kvbackend::KVBACKEND_ISA
