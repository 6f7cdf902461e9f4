// Which kernel table runs: the best one that this CPU and its operating system support (cpu_features.h).
// Flags: none beyond the common ones; this code runs before anything is known about the CPU.
#include "kitsune_cpu/kernels.h"

#include <atomic>
#include <cstring>
#include <initializer_list>

#include "cpu_features.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

// The units of NEON kernels are empty on big-endian machines.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KITSUNE_HAS_NEON
#endif

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
namespace amx {
KernelTable make_table();
}
#elif defined(KITSUNE_HAS_NEON)
namespace neon {
extern const KernelTable table;
}
namespace neonbf16 {
extern const KernelTable table;
}
#endif

namespace {

// The table of a name that isas_for has given.
const KernelTable* table_of(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "amx") == 0) {
    static const KernelTable table = amx::make_table();
    return &table;
  }
  for (const KernelTable* t : {&avx512bf16::table, &avx512::table, &avx2::table})
    if (std::strcmp(t->isa, isa) == 0) return t;
#endif
  static_cast<void>(isa);
  return &generic::table;
}

struct Candidates {
  const KernelTable* tables[kMostIsas];
  int count = 0;
};

#if defined(KITSUNE_HAS_NEON)
// FEAT_BF16, as the operating system reports it. Where there is none to ask, the answer is no.
bool has_neon_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16 of Linux's <asm/hwcap.h>
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
  int32_t has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}
#endif

// Best first. Asks the operating system for tiles, where the CPU has them: once, because `candidates` keeps the answer.
Candidates find_candidates() {
#if defined(__x86_64__)
  const Isas isas = isas_for(features(kThisCpu));
#else
  const Isas isas = isas_for(Features{});
#endif
  Candidates c;
#if defined(KITSUNE_HAS_NEON)
  if (has_neon_bf16()) c.tables[c.count++] = &neonbf16::table;
  c.tables[c.count++] = &neon::table;
#endif
  for (int i = 0; i < isas.count; ++i) c.tables[c.count++] = table_of(isas.names[i]);
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
