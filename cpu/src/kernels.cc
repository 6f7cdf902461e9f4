// Which kernel table runs, and tables of activations that all of them share.
// Flags: none beyond the common ones; this code runs before anything is known about the CPU.
#include "kitsune_cpu/kernels.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <numeric>
#include <vector>

#include "cpu_features.h"  // says whether this CPU may have NEON

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(KITSUNE_HAS_NEON) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(KITSUNE_HAS_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "activation_tables.h"

namespace kitsune::cpu {

namespace {

bool bit(uint32_t word, int i) { return ((word >> i) & 1) != 0; }

// States that the operating system saves (bits of XCR0): SSE and AVX; with them the masks and upper halves of AVX-512; the
// configuration and the data of tiles.
constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6, kTileState = 0x60000;

// Of palette 1: tiles of at least 16 rows of 64 bytes, eight of them.
bool has_full_tiles(const Probe& p) {
  if (p.cpuid(0, 0).eax < 0x1d || p.cpuid(0x1d, 0).eax < 1) return false;
  CpuidAnswer palette = p.cpuid(0x1d, 1);
  return (palette.ebx & 0xffff) >= 64 && (palette.ebx >> 16) >= 8 && (palette.ecx & 0xffff) >= 16;
}

}  // namespace

Features features(const Probe& p) {
  Features f;
  const uint32_t leaves = p.cpuid(0, 0).eax;
  if (leaves < 7) return f;
  const CpuidAnswer one = p.cpuid(1, 0), seven = p.cpuid(7, 0);
  const CpuidAnswer more = seven.eax >= 1 ? p.cpuid(7, 1) : CpuidAnswer{};
  const bool saves = bit(one.ecx, 27);  // OSXSAVE
  const uint64_t state = saves ? p.xcr0() : 0;
  auto saved = [&](uint64_t bits) { return (state & bits) == bits; };
  f.avx2 = saved(kAvxState) && bit(one.ecx, 28) && bit(one.ecx, 12) && bit(one.ecx, 29) && bit(seven.ebx, 5);
  f.avx512 = f.avx2 && saved(kAvx512State) && bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);
  f.avx512bf16 = f.avx512 && bit(more.eax, 5);
  const bool tiles = f.avx512bf16 && bit(seven.edx, 22) && bit(seven.edx, 24) && saved(kTileState) && has_full_tiles(p);
  f.amx = tiles && p.allow_tiles();
  return f;
}

Isas isas_for(const Features& f) {
  Isas isas;
  auto add = [&](bool has, const char* name) {
    if (has) isas.names[isas.count++] = name;
  };
  add(f.amx, "amx");
  add(f.avx512bf16, "avx512bf16");
  add(f.avx512, "avx512");
  add(f.avx2, "avx2");
  add(f.neonbf16, "neonbf16");
  add(f.neon, "neon");
  add(true, "generic");
  return isas;
}

#if defined(__x86_64__)
namespace {

CpuidAnswer cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidAnswer a{};
  if (__get_cpuid_count(leaf, subleaf, &a.eax, &a.ebx, &a.ecx, &a.edx) == 0) return {};
  return a;
}

uint64_t xcr0() {
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Linux keeps the 8 KiB of tiles of a thread only where the process has asked for it (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA,
// Documentation/arch/x86/xstate.rst); threads and forked processes inherit the answer. It refuses before Linux 5.16, and where a
// thread's alternative signal stack is too small for the larger frame.
bool allow_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

Features features_of_this_cpu() { return features({&cpuid, &xcr0, &allow_tiles}); }

#elif defined(KITSUNE_HAS_NEON)
namespace {

// FEAT_BF16, as the operating system reports it: the register that tells is not for programs. Where there is none to ask, no.
bool has_bf16() {
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

}  // namespace

Features features_of_this_cpu() {
  Features f;
  f.neon = true;
  f.neonbf16 = has_bf16();
  return f;
}

#else
Features features_of_this_cpu() { return {}; }
#endif

// Which kernel table runs: the best one that this CPU and its operating system support (cpu_features.h).

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

namespace {

constexpr int64_t kOperands = 65536;
constexpr int kMostTables = 64;

struct Table {
  RoundedActivation of;
  EvaluateRounded evaluate;
  float* results;
  Table* next;
};

std::atomic<Table*> tables{nullptr};  // never shrinks, so it is read without a lock
std::mutex adding;

bool same(float x, float y) { return std::memcmp(&x, &y, sizeof x) == 0; }

const Table* find(const RoundedActivation& of, EvaluateRounded evaluate) {
  for (const Table* t = tables.load(std::memory_order_acquire); t != nullptr; t = t->next) {
    const RoundedActivation& o = t->of;
    if (o.kind == of.kind && same(o.a, of.a) && same(o.b, of.b) && o.rounds == of.rounds && o.coarse == of.coarse &&
        t->evaluate == evaluate)
      return t;
  }
  return nullptr;
}

}  // namespace

const float* activation_table(const RoundedActivation& of, EvaluateRounded evaluate) {
  if (const Table* known = find(of, evaluate)) return known->results;
  const std::lock_guard<std::mutex> lock(adding);
  if (const Table* known = find(of, evaluate)) return known->results;
  Table* first = tables.load(std::memory_order_relaxed);
  int count = 0;
  for (const Table* t = first; t != nullptr; t = t->next) ++count;
  if (count >= kMostTables) return nullptr;
  float* results = static_cast<float*>(std::aligned_alloc(64, kOperands * sizeof(float)));
  if (results == nullptr) return nullptr;
  std::vector<uint16_t> operands(kOperands);
  std::iota(operands.begin(), operands.end(), uint16_t{0});
  kernels().load(DType::kF32, of.rounds)(kOperands, results, operands.data(), 1);
  evaluate(of, kOperands, results, results);
  tables.store(new Table{of, evaluate, results, first}, std::memory_order_release);
  return results;
}

}  // namespace kitsune::cpu
