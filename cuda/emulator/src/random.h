// Numbers that depend only on the seed: splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
#pragma once

#include "kitsune/arch/types.h"

namespace kitsune::emulator {

struct Random {
  arch::u64 state = 0;
  arch::u64 next() {
    arch::u64 z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  arch::u32 below(arch::u32 n) { return static_cast<arch::u32>((next() >> 32) * n >> 32); }
};

}  // namespace kitsune::emulator
