// Which instruction sets of x86-64 the CPU has and the operating system lets us use.
//
// Comes in: what CPUID, XGETBV and the operating system answer, as functions, so that tests can answer for machines they do not
// have. Goes out: `Features`. Asked of CPUID directly, because compilers' builtins lack names for some (Clang 14), and hide the
// rest.
#pragma once

#include <cstdint>

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
};

Features features(const Probe& probe);

// The kernel tables that run with these features, best first; "generic" is always the last.
constexpr int kMostIsas = 5;
struct Isas {
  const char* names[kMostIsas];
  int count = 0;
};
Isas isas_for(const Features& f);

#if defined(__x86_64__)
extern const Probe kThisCpu;
#endif

}  // namespace kitsune::cpu
