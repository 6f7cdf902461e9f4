// Which kernel table runs: the best one this CPU (and its operating system, which __builtin_cpu_supports asks about too) supports.
// Flags: none beyond the common ones; this code runs before anything is known about the CPU.
#include "kitsune_cpu/kernels.h"

#include <atomic>
#include <cstring>

namespace kitsune::cpu {

namespace generic {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
namespace avx512bf16 {
extern const KernelTable table;
}
#endif

namespace {

struct Candidates {
  const KernelTable* tables[4];
  int count = 0;
};

// Best first.
Candidates find_candidates() {
  Candidates c;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) c.tables[c.count++] = &avx512bf16::table;
  if (has_avx512) c.tables[c.count++] = &avx512::table;
  if (has_avx2) c.tables[c.count++] = &avx2::table;
#endif
  c.tables[c.count++] = &generic::table;
  return c;
}

const Candidates& candidates() {
  static const Candidates c = find_candidates();
  return c;
}

std::atomic<const KernelTable*> chosen{nullptr};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* t = chosen.load(std::memory_order_acquire);
  return t ? *t : *candidates().tables[0];
}

bool set_isa(const char* name) {
  for (int i = 0; i < candidates().count; ++i) {
    if (std::strcmp(candidates().tables[i]->isa, name) == 0) {
      chosen.store(candidates().tables[i], std::memory_order_release);
      return true;
    }
  }
  return false;
}

int available_isas(const char** names, int capacity) {
  int count = candidates().count;
  for (int i = 0; i < count && i < capacity; ++i) names[i] = candidates().tables[i]->isa;
  return count;
}

}  // namespace kitsune::cpu
