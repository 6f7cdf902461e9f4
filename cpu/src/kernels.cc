// Which kernel table runs: the best one that this CPU and its operating system support (cpu_features.h).
// Flags: none beyond the common ones; this code runs before anything is known about the CPU.
#include "kitsune_cpu/kernels.h"

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "cpu_features.h"

namespace kitsune::cpu {

namespace generic {
const KernelTable& table();
}
#if defined(__x86_64__)
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
namespace avx512bf16 {
const KernelTable& table();
}
namespace amx {
const KernelTable& table();
}
#elif defined(KITSUNE_HAS_NEON)
namespace neon {
const KernelTable& table();
}
namespace neonbf16 {
const KernelTable& table();
}
#endif

namespace {

// The table of a name that isas_for has given. The functions that hand them out are compiled with their set's flags: only those of
// sets that this CPU has are called.
const KernelTable* table_of(const char* isa) {
  struct Named {
    const char* isa;
    const KernelTable& (*table)();
  };
  constexpr Named kTables[] = {
#if defined(__x86_64__)
      {"amx", &amx::table},         {"avx512bf16", &avx512bf16::table}, {"avx512", &avx512::table}, {"avx2", &avx2::table},
#elif defined(KITSUNE_HAS_NEON)
      {"neonbf16", &neonbf16::table},
      {"neon", &neon::table},
#endif
      {"generic", &generic::table},
  };
  for (const Named& t : kTables)
    if (std::strcmp(t.isa, isa) == 0) return &t.table();
  return &generic::table();
}

struct Candidates {
  const KernelTable* tables[kMostIsas];
  int count = 0;
};

// Best first. Asks the operating system for tiles, where the CPU has them: once, because `candidates` keeps the answer.
Candidates find_candidates() {
  const Isas isas = isas_for(features_of_this_cpu());
  Candidates c;
  for (; c.count < isas.count; ++c.count) c.tables[c.count] = table_of(isas.names[c.count]);
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

void set_kernels(const KernelTable* table) { chosen.store(table, std::memory_order_release); }

int available_isas(const char** names, int capacity) {
  int count = candidates().count;
  for (int i = 0; i < count && i < capacity; ++i) names[i] = candidates().tables[i]->isa;
  return count;
}

}  // namespace kitsune::cpu
