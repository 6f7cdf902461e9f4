// Rows of arrays in global memory to and from a thread's part of a tile.
//
// Comes in: the address of a row, the thread's first column. Goes out: the thread's C = kOwned columns of it. Invariants: nothing
// outside the array is touched (rows beyond the stream and columns beyond the array read as zero and are not written), and accesses
// are 16 bytes wide where the array allows (`Vector`: its rows are 16-byte aligned and as wide as the tile).
#pragma once

#include "kitsune/layout.h"

namespace kitsune {

// How elements of an array turn into the values a stage computes with.
template <class E>
struct Element;
template <>
struct Element<float> {
  using Value = float;
  using Bits = u32;
  static KITSUNE_DEVICE float load(u32 b) { return from_bits(b); }
  static KITSUNE_DEVICE u32 store(float v) { return bits(v); }
};
template <>
struct Element<Bf16> {
  using Value = float;
  using Bits = u16;
  static KITSUNE_DEVICE float load(u16 b) { return from_bf16(b); }
  static KITSUNE_DEVICE u16 store(float v) { return to_bf16(v); }
};
template <>
struct Element<F16> {
  using Value = float;
  using Bits = u16;
  static KITSUNE_DEVICE float load(u16 b) { return from_f16(b); }
  static KITSUNE_DEVICE u16 store(float v) { return to_f16(v); }
};
template <>
struct Element<i32> {
  using Value = i32;
  using Bits = u32;
  static KITSUNE_DEVICE i32 load(u32 b) { return static_cast<i32>(b); }
  static KITSUNE_DEVICE u32 store(i32 v) { return static_cast<u32>(v); }
};
template <>
struct Element<u32> {
  using Value = u32;
  using Bits = u32;
  static KITSUNE_DEVICE u32 load(u32 b) { return b; }
  static KITSUNE_DEVICE u32 store(u32 v) { return v; }
};
template <>
struct Element<bool> {
  using Value = bool;
  using Bits = u8;
  static KITSUNE_DEVICE bool load(u8 b) { return b != 0; }
  static KITSUNE_DEVICE u8 store(bool v) { return v ? 1 : 0; }
};

// Two values in a register, the first in the lower half.
template <class E>
KITSUNE_DEVICE u32 pack(float lo, float hi);
template <>
KITSUNE_DEVICE u32 pack<Bf16>(float lo, float hi) {
  return pack_bf16(lo, hi);
}
template <>
KITSUNE_DEVICE u32 pack<F16>(float lo, float hi) {
  return pack_f16(lo, hi);
}
template <class E>
KITSUNE_DEVICE float unpack(u32 pair, int e);
template <>
KITSUNE_DEVICE float unpack<Bf16>(u32 pair, int e) {
  return e ? bf16_hi(pair) : bf16_lo(pair);
}
template <>
KITSUNE_DEVICE float unpack<F16>(u32 pair, int e) {
  return e ? f16_hi(pair) : f16_lo(pair);
}

// C columns of a row whose elements are 4 bytes, as bits.
template <int C, bool Vector>
KITSUNE_DEVICE void load_words(u32 (&out)[C], const u32* row, int column, int columns, bool valid) {
  if constexpr (Vector && C % 4 == 0) {
    KITSUNE_UNROLL
    for (int i = 0; i < C / 4; ++i) {
      U4 v = {0, 0, 0, 0};
      if (valid) v = ld_global(reinterpret_cast<const U4*>(row + column) + i);
      out[4 * i] = v.x, out[4 * i + 1] = v.y, out[4 * i + 2] = v.z, out[4 * i + 3] = v.w;
    }
  } else {
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = valid && column + c < columns ? ld_global(row + column + c) : 0;
  }
}

// C columns of a row of 16-bit elements, as C / 2 pairs.
template <int C, bool Vector>
KITSUNE_DEVICE void load_halves(u32 (&out)[C / 2], const u16* row, int column, int columns, bool valid) {
  if constexpr (Vector && C == 8) {
    U4 v = {0, 0, 0, 0};
    if (valid) v = ld_global(reinterpret_cast<const U4*>(row + column));
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else {
    KITSUNE_UNROLL
    for (int i = 0; i < C / 2; ++i) {
      u32 lo = valid && column + 2 * i < columns ? ld_global(row + column + 2 * i) : 0;
      u32 hi = valid && column + 2 * i + 1 < columns ? ld_global(row + column + 2 * i + 1) : 0;
      out[i] = lo | hi << 16;
    }
  }
}

// C columns of a row as values.
template <class E, int C, bool Vector>
KITSUNE_DEVICE void load_row(typename Element<E>::Value (&out)[C], const void* row, int column, int columns, bool valid) {
  using Bits = typename Element<E>::Bits;
  if constexpr (sizeof(Bits) == 4) {
    u32 words[C];
    load_words<C, Vector>(words, static_cast<const u32*>(row), column, columns, valid);
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = Element<E>::load(words[c]);
  } else if constexpr (sizeof(Bits) == 2) {
    u32 pairs[C / 2];
    load_halves<C, Vector>(pairs, static_cast<const u16*>(row), column, columns, valid);
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = unpack<E>(pairs[c / 2], c & 1);
  } else {
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c)
      out[c] = valid && column + c < columns ? Element<E>::load(ld_global(static_cast<const Bits*>(row) + column + c))
                                             : Element<E>::load(0);
  }
}

// The other way: C columns to a row of an array.
template <class E, int C, bool Vector>
KITSUNE_DEVICE void store_row(void* row, int column, int columns, bool valid, const typename Element<E>::Value (&in)[C]) {
  using Bits = typename Element<E>::Bits;
  if (!valid) return;
  if constexpr (Vector && sizeof(Bits) == 4 && C % 4 == 0) {
    U4* to = reinterpret_cast<U4*>(static_cast<u32*>(row) + column);
    KITSUNE_UNROLL
    for (int i = 0; i < C / 4; ++i)
      st_global(to + i, U4{Element<E>::store(in[4 * i]), Element<E>::store(in[4 * i + 1]), Element<E>::store(in[4 * i + 2]),
                           Element<E>::store(in[4 * i + 3])});
  } else if constexpr (Vector && sizeof(Bits) == 2 && C == 8) {
    st_global(reinterpret_cast<U4*>(static_cast<u16*>(row) + column),
              U4{pack<E>(in[0], in[1]), pack<E>(in[2], in[3]), pack<E>(in[4], in[5]), pack<E>(in[6], in[7])});
  } else {
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c)
      if (column + c < columns) st_global(static_cast<Bits*>(row) + column + c, Element<E>::store(in[c]));
  }
}

// Columns that do not lie together: `offset(column)` elements from the row's start.
template <class E, int C, class Offset>
KITSUNE_DEVICE void load_strided(typename Element<E>::Value (&out)[C], const void* row, int column, int columns, bool valid,
                                 Offset offset) {
  using Bits = typename Element<E>::Bits;
  KITSUNE_UNROLL
  for (int c = 0; c < C; ++c)
    out[c] = valid && column + c < columns ? Element<E>::load(ld_global(static_cast<const Bits*>(row) + offset(column + c)))
                                           : Element<E>::load(0);
}
template <class E, int C, class Offset>
KITSUNE_DEVICE void store_strided(void* row, int column, int columns, bool valid, const typename Element<E>::Value (&in)[C],
                                  Offset offset) {
  using Bits = typename Element<E>::Bits;
  KITSUNE_UNROLL
  for (int c = 0; c < C; ++c)
    if (valid && column + c < columns) st_global(static_cast<Bits*>(row) + offset(column + c), Element<E>::store(in[c]));
}

// The one element of a row that has one.
template <class E>
KITSUNE_DEVICE typename Element<E>::Value load_one(const void* row, bool valid) {
  using Bits = typename Element<E>::Bits;
  return Element<E>::load(valid ? ld_global(static_cast<const Bits*>(row)) : Bits(0));
}
template <class E>
KITSUNE_DEVICE void store_one(void* row, bool valid, typename Element<E>::Value v) {
  using Bits = typename Element<E>::Bits;
  if (valid) st_global(static_cast<Bits*>(row), Element<E>::store(v));
}

// A stationary vector of floats, padded to the tile's width: the thread's C columns from `column` on.
template <int C>
KITSUNE_DEVICE void load_vector(float (&out)[C], const float* vector, int column) {
  if constexpr (C % 4 == 0) {
    KITSUNE_UNROLL
    for (int i = 0; i < C / 4; ++i) {
      U4 v = ld_global(reinterpret_cast<const U4*>(vector + column) + i);
      out[4 * i] = from_bits(v.x), out[4 * i + 1] = from_bits(v.y), out[4 * i + 2] = from_bits(v.z),
              out[4 * i + 3] = from_bits(v.w);
    }
  } else {
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = ld_global(vector + column + c);
  }
}

}  // namespace kitsune
