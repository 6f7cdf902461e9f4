// Huge pages for memory that is about to be touched for the first time.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kitsune::cpu {

constexpr size_t kHugePage = size_t{2} << 20;

// Asks the kernel for huge pages where [data, data + bytes) has some that lie in it as a whole. XLA's memory for large results is
// fresh at every call, and 512 page faults take several times as long as one. A hint: what holds data already stays as it is.
inline void advise_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  uintptr_t at = reinterpret_cast<uintptr_t>(data);
  uintptr_t begin = (at + kHugePage - 1) / kHugePage * kHugePage, end = (at + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace kitsune::cpu
