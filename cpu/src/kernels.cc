// Which kernel table runs: the best one this CPU (and its operating system, which __builtin_cpu_supports asks about too) supports.
// Flags: none beyond the common ones; this code runs before anything is known about the CPU.
#include "kitsune_cpu/kernels.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
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
#elif defined(KITSUNE_HAS_NEON)
namespace neon {
extern const KernelTable table;
}
namespace neonbf16 {
extern const KernelTable table;
}
#endif

namespace {

struct Candidates {
  const KernelTable* tables[4];
  int count = 0;
};

#if defined(__x86_64__)
// Asked of CPUID directly, because Clang 14 has no names for them in __builtin_cpu_supports. That the operating system saves the
// registers follows from the builtin's answers for avx2 and avx512f.
bool has_f16c() {  // leaf 1, ECX bit 29
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && ((ecx >> 29) & 1) != 0;
}

bool has_avx512bf16() {  // leaf 7, subleaf 1, EAX bit 5
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && ((eax >> 5) & 1) != 0;
}
#elif defined(KITSUNE_HAS_NEON)
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

// Best first.
Candidates find_candidates() {
  Candidates c;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && has_avx512bf16()) c.tables[c.count++] = &avx512bf16::table;
  if (has_avx512) c.tables[c.count++] = &avx512::table;
  if (has_avx2) c.tables[c.count++] = &avx2::table;
#elif defined(KITSUNE_HAS_NEON)
  if (has_neon_bf16()) c.tables[c.count++] = &neonbf16::table;
  c.tables[c.count++] = &neon::table;
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
