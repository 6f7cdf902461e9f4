// Arithmetic on sizes that saturates: a size that does not fit in 64 bits becomes kTooLarge and stays it, until it is refused where
// memory is laid out.
//
// Always inlined, because the units of an instruction set include this too: a copy compiled for one of them must not be linked into
// code that runs on every CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kitsune::cpu {

constexpr size_t kTooLarge = SIZE_MAX;

#define KITSUNE_CHECKED inline __attribute__((always_inline))

KITSUNE_CHECKED size_t plus(size_t a, size_t b) {
  size_t r = 0;
  return __builtin_add_overflow(a, b, &r) ? kTooLarge : r;
}

KITSUNE_CHECKED size_t times(size_t a, size_t b) {
  size_t r = 0;
  return __builtin_mul_overflow(a, b, &r) ? kTooLarge : r;
}

// The next multiple of `unit`, a power of two.
KITSUNE_CHECKED size_t rounded_up(size_t n, size_t unit) {
  size_t r = plus(n, unit - 1);
  return r == kTooLarge ? kTooLarge : r / unit * unit;
}

#undef KITSUNE_CHECKED

}  // namespace kitsune::cpu
