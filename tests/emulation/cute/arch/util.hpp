// Addresses in shared memory are counted from its beginning.
#pragma once

#include <cstdint>

#include <cute/layout.hpp>

namespace warploom::hopper {
extern char shared_memory[];
}  // namespace warploom::hopper

namespace cute {

inline std::uint32_t cast_smem_ptr_to_uint(const void* there) {
  return static_cast<const char*>(there) - warploom::hopper::shared_memory;
}

// Where a byte of swizzled rows of 128 bytes, or of 64, lies.
inline std::uint32_t swizzled(std::uint32_t at, unsigned row_bytes) {
  return at ^ (at >> 7 & (row_bytes == 128 ? 7 : 3)) << 4;
}

}  // namespace cute
