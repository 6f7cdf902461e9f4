// Which instruction sets the CPU has and the operating system lets us use.
//
// Comes in: what CPUID, XGETBV and the operating system answer, as functions, so that tests can answer for machines they do not
// have. Goes out: `Features`. Asked of CPUID directly, because compilers' builtins lack names for some (Clang 14), and hide the
// rest.
#pragma once

#include <cstdint>

// The units of NEON kernels are empty on big-endian machines.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KITSUNE_HAS_NEON
#endif

namespace kitsune::cpu {

struct CpuidAnswer {
  uint32_t eax, ebx, ecx, edx;
};

struct Probe {
  CpuidAnswer (*cpuid)(uint32_t leaf, uint32_t subleaf);  // zeros for a leaf beyond the last
  uint64_t (*xcr0)();                                     // asked only where CPUID says that XGETBV works
  bool (*allow_tiles)();  // asks the operating system for the state of tiles, for the whole process; only where there are tiles
};

struct Features {
  bool avx2 = false;        // with FMA and F16C
  bool avx512 = false;      // F, BW, DQ and VL
  bool avx512bf16 = false;  // and BF16
  bool amx = false;         // and AMX-TILE and AMX-BF16, tiles of 16 rows of 64 bytes, and permission to use them
  bool neon = false;        // AArch64, little-endian
  bool neonbf16 = false;    // and FEAT_BF16
};

Features features(const Probe& probe);

// The kernel tables that run with these features, best first; "generic" is always the last.
constexpr int kMostIsas = 5;
struct Isas {
  const char* names[kMostIsas];
  int count = 0;
};
Isas isas_for(const Features& f);

// Asks the operating system for tiles, where the CPU has them, and on Arm for what it knows of the CPU.
Features features_of_this_cpu();

}  // namespace kitsune::cpu
