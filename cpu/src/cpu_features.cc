// Flags: none beyond the common ones; this code runs before anything is known about the CPU.
#include "cpu_features.h"

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

}  // namespace kitsune::cpu
