// The tile instructions of AMX in plain C++, with the same bits: the kernels of src/kernels/amx.h are compiled against this and
// tested on every machine. Found equal to the instructions of an Emerald Rapids over 12 000 products with denormals, Inf and NaN.
//
// The model also keeps the rules of their use, and aborts where one is broken: a tile is touched by a thread only between its
// tile_configure and tile_release, which come in turns; shapes fit; strides reach what the kernels may touch (the sanitizers and
// guard pages of the tests see what is read).
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/scalar.h"

namespace kitsune::cpu::KITSUNE_ISA {

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "as LDTILECFG reads it");

// Of all threads together.
inline int64_t times_configured = 0, times_released = 0;

struct ModelTiles {
  bool configured = false;
  TileConfig config;
  uint8_t data[8][16][64];
};
static thread_local ModelTiles model;

inline void must(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "tile model: %s\n", what);
  abort();
}

inline void tile_configure(const TileConfig& c) {
  must(!model.configured, "a thread configures its tiles twice in a call");
  must(c.palette == 1 && c.start_row == 0, "the configuration is not of palette 1");
  for (int t = 0; t < 16; ++t) {
    must(c.rows[t] <= 16 && c.row_bytes[t] <= 64 && (c.rows[t] == 0) == (c.row_bytes[t] == 0), "the shape of a tile");
    must(t < 8 || c.rows[t] == 0, "a tile beyond the eighth");
  }
  model.configured = true;
  model.config = c;
  __builtin_memset(model.data, 0, sizeof model.data);
  __atomic_add_fetch(&times_configured, 1, __ATOMIC_SEQ_CST);
}

inline void tile_release() {
  must(model.configured, "a thread releases tiles that it has not configured");
  model.configured = false;
  __atomic_add_fetch(&times_released, 1, __ATOMIC_SEQ_CST);
}

template <int T>
int tile_rows() {
  must(model.configured, "a tile is used without a configuration");
  must(model.config.rows[T] != 0, "a tile is used that has no shape");
  return model.config.rows[T];
}

template <int T>
void tile_zero() {
  tile_rows<T>();
  __builtin_memset(model.data[T], 0, sizeof model.data[T]);
}

template <int T>
void tile_load(const void* from, int64_t stride) {
  const int rows = tile_rows<T>();
  __builtin_memset(model.data[T], 0, sizeof model.data[T]);
  for (int r = 0; r < rows; ++r)
    __builtin_memcpy(model.data[T][r], static_cast<const char*>(from) + r * stride, model.config.row_bytes[T]);
}

template <int T>
void tile_store(void* to, int64_t stride) {
  const int rows = tile_rows<T>();
  for (int r = 0; r < rows; ++r) __builtin_memcpy(static_cast<char*>(to) + r * stride, model.data[T][r], model.config.row_bytes[T]);
}

// ---- One multiply-add of the tile unit: rounded once to nearest even; denormal operands and results are zeros of their sign,
// whatever MXCSR says; the NaN is the first that is one of (a, b, c), made quiet, or 0xffc00000 for an invalid operation.

inline bool model_nan(float f) { return (bit_cast<uint32_t>(f) & 0x7fffffff) > 0x7f800000; }

inline float model_flushed(float f) {
  uint32_t u = bit_cast<uint32_t>(f);
  return (u & 0x7f800000) != 0 ? f : bit_cast<float>(u & 0x80000000);
}

inline float model_fused(float a, float b, float c) {
  const float operands[] = {a, b, c};
  for (float f : operands)
    if (model_nan(f)) return bit_cast<float>(bit_cast<uint32_t>(f) | 0x400000);
  a = model_flushed(a), b = model_flushed(b), c = model_flushed(c);
  const float r = __builtin_fmaf(a, b, c);
  if (model_nan(r)) return bit_cast<float>(0xffc00000u);
  // What is tiny is judged after rounding to 24 bits with an unbounded exponent: a result that only the coarser grid of denormals
  // rounds up to the least normal number is flushed too. The sum is exact in double there.
  constexpr float kLeast = 0x1p-126f;
  if (__builtin_fabsf(r) == kLeast && __builtin_fabs(double(a) * b + c) < 0x1p-126 - 0x1p-151) return __builtin_copysignf(0, r);
  return model_flushed(r);
}

// For each element two chains, of the even and of the odd k, joined at the end and then added to C.
template <int C, int A, int B>
void tile_multiply() {
  const int rows = tile_rows<C>(), depth = tile_rows<B>(), columns = model.config.row_bytes[C] / 4;
  must(tile_rows<A>() == rows && model.config.row_bytes[A] == 4 * depth && model.config.row_bytes[B] == 4 * columns,
       "tiles of shapes that do not fit are multiplied");
  auto value = [](const uint8_t* row, int i) {
    BFloat16 h;
    __builtin_memcpy(&h, row + 2 * i, 2);
    return to_float(h);
  };
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      float even = 0, odd = 0, c;
      for (int k = 0; k < depth; ++k) {
        even = model_fused(value(model.data[A][m], 2 * k), value(model.data[B][k], 2 * n), even);
        odd = model_fused(value(model.data[A][m], 2 * k + 1), value(model.data[B][k], 2 * n + 1), odd);
      }
      __builtin_memcpy(&c, &model.data[C][m][4 * n], 4);
      c = model_fused(c, 1, model_fused(even, 1, odd));
      __builtin_memcpy(&model.data[C][m][4 * n], &c, 4);
    }
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
