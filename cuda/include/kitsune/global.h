// Rows of arrays in global memory to and from a thread's part of a tile.
//
// Comes in: the address of a row, the thread's first column. Goes out: the thread's C = kOwned columns of it. Invariants: nothing
// outside the array is touched (rows beyond the stream and columns beyond the array read as zero and are not written), and accesses
// are as wide as the pitch and the width of the array allow, 16 bytes at most.
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

// The number of a format that is nearest to `v`. By way of the upper half of a register: conversions to and from 16 bits make ptxas
// read sums of a product in flight, and so wait for each product (C7514).
template <class E>
KITSUNE_DEVICE float rounded_to(float v) {
  return unpack<E>(pack<E>(0.0f, v), 1);
}

// How many bytes an access to a row has (`Bytes`): 16, or as many as the pitch and the width of the array allow. Rows that a lane
// has brought to shared memory first (stage/rows.h) start on any byte of theirs, and are read word by word.
constexpr int kStaged = 0;
// Rows of an entry of the ring of tiles, whose pitch allows 16 bytes at once: as they lie in memory, or in boxes (`box_address`).
constexpr int kInRing = -16;
constexpr int kInBoxes = -17;

// A box of 64 columns of 16 bits by the rows of a tile, as a tensor map with the 128-byte swizzle brings it: an operand of wgmma.
// It starts on 1024 bytes. Wider tiles are boxes side by side.
constexpr int kBoxColumns = 64;
constexpr u32 kBoxBytes = 8192;
// The place of `column`, and of the others of its 16 bytes, in the row that starts at `row` of the first box.
KITSUNE_DEVICE const u16* box_address(const void* row, int column) {
  const u64 at = reinterpret_cast<u64>(row) + column / kBoxColumns * kBoxBytes + column % kBoxColumns * 2;
  return reinterpret_cast<const u16*>(at ^ (at >> 7 & 7) << 4);
}

template <int Bytes>
struct Access;
template <>
struct Access<4> {
  using Type = u32;
  static KITSUNE_DEVICE void split(u32* out, u32 v) { out[0] = v; }
  static KITSUNE_DEVICE u32 join(const u32* in) { return in[0]; }
};
template <>
struct Access<8> {
  using Type = U2;
  static KITSUNE_DEVICE void split(u32* out, U2 v) { out[0] = v.x, out[1] = v.y; }
  static KITSUNE_DEVICE U2 join(const u32* in) { return {in[0], in[1]}; }
};
template <>
struct Access<16> {
  using Type = U4;
  static KITSUNE_DEVICE void split(u32* out, U4 v) { out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w; }
  static KITSUNE_DEVICE U4 join(const u32* in) { return {in[0], in[1], in[2], in[3]}; }
};

// C columns of a row as the words that they fill; the array's columns end between two accesses. The compiler knows what a thread's
// first column may be: where the row is as wide as the tile, `valid` is all that is looked at.
template <class Bits, int C, int Bytes>
KITSUNE_DEVICE void load_words(u32* out, const Bits* row, int column, int columns, bool valid) {
  using To = Access<Bytes>;
  constexpr int kEach = Bytes / sizeof(Bits);
  KITSUNE_UNROLL
  for (int i = 0; i < C / kEach; ++i) {
    typename To::Type v = {};
    if (valid && column + i * kEach < columns) v = ld_global(reinterpret_cast<const typename To::Type*>(row + column) + i);
    To::split(out + i * Bytes / 4, v);
  }
}
template <class Bits, int C, int Bytes>
KITSUNE_DEVICE void store_words(Bits* row, int column, int columns, bool valid, const u32* in) {
  using From = Access<Bytes>;
  constexpr int kEach = Bytes / sizeof(Bits);
  KITSUNE_UNROLL
  for (int i = 0; i < C / kEach; ++i)
    if (valid && column + i * kEach < columns)
      st_global(reinterpret_cast<typename From::Type*>(row + column) + i, From::join(in + i * Bytes / 4));
}

// C columns of a staged row, `left` of them in the row, which starts at `row`. Rows beyond the stream are zeros there. Every load
// is made, of a word of the row where it would leave the row: ptxas takes a load under a condition for a divergent path, on which
// registers of wgmma may not be made (C7519).
template <class Bits, int C>
KITSUNE_DEVICE void load_staged(Bits (&out)[C], const Bits* row, int column, int columns) {
  KITSUNE_UNROLL
  for (int c = 0; c < C; ++c) {
    const Bits v = ld_shared(column + c < columns ? row + column + c : row);
    out[c] = column + c < columns ? v : Bits(0);
  }
}
// 16-bit elements as pairs: the words that they lie in, shifted by a half where the first one is the second half of its word.
template <int C>
KITSUNE_DEVICE void load_staged_halves(u32 (&out)[C / 2], const u16* row, int column, int columns) {
  const u32 half = static_cast<u32>(reinterpret_cast<u64>(row + column)) / 2 & 1;
  const int left = columns - column;
  const u32* const words = reinterpret_cast<const u32*>(row + column - half);
  const u32* const first = reinterpret_cast<const u32*>(row - (static_cast<u32>(reinterpret_cast<u64>(row)) / 2 & 1));
  u32 w[C / 2 + 1];
  KITSUNE_UNROLL
  for (int i = 0; i <= C / 2; ++i) w[i] = ld_shared(2 * i < left + static_cast<int>(half) ? words + i : first);
  KITSUNE_UNROLL
  for (int i = 0; i < C / 2; ++i) {
    const u32 pair = static_cast<u32>((static_cast<u64>(w[i + 1]) << 32 | w[i]) >> 16 * half);
    out[i] = 2 * i + 1 < left ? pair : 2 * i < left ? pair & 0xffffu : 0;  // what follows is the next row
  }
}

// C columns of a row in the ring of tiles, as the words that they fill. Every load is made here too. Rows beyond the stream have
// the address of one that is there, so nothing is looked at where the row is as wide as the tile.
template <class Bits, int C>
KITSUNE_DEVICE void load_ring_words(u32* out, const Bits* row, int column, int columns) {
  constexpr int kEach = 16 / sizeof(Bits);
  static_assert(C % kEach == 0);
  KITSUNE_UNROLL
  for (int i = 0; i < C / kEach; ++i) {
    const bool inside = column + i * kEach < columns;
    const U4 v = ld_shared(reinterpret_cast<const U4*>(inside ? row + column + i * kEach : row));
    Access<16>::split(out + 4 * i, inside ? v : U4{});
  }
}
// The same of a row in boxes, which are as wide as the row.
template <int C>
KITSUNE_DEVICE void load_box_words(u32* out, const void* row, int column) {
  static_assert(C == 8, "a thread's columns of a block are 16 bytes");
  Access<16>::split(out, ld_shared(reinterpret_cast<const U4*>(box_address(row, column))));
}

// C columns of a row of 16-bit elements, as C / 2 pairs.
template <int C, int Bytes>
KITSUNE_DEVICE void load_halves(u32 (&out)[C / 2], const void* row, int column, int columns, bool valid) {
  if constexpr (Bytes == kStaged) {
    load_staged_halves<C>(out, static_cast<const u16*>(row), column, columns);
  } else if constexpr (Bytes == kInRing) {
    load_ring_words<u16, C>(out, static_cast<const u16*>(row), column, columns);
  } else if constexpr (Bytes == kInBoxes) {
    load_box_words<C>(out, row, column);
  } else if constexpr (Bytes == 2) {
    const u16* const from = static_cast<const u16*>(row) + column;
    KITSUNE_UNROLL
    for (int i = 0; i < C / 2; ++i) {
      u32 lo = valid && column + 2 * i < columns ? ld_global(from + 2 * i) : 0;
      u32 hi = valid && column + 2 * i + 1 < columns ? ld_global(from + 2 * i + 1) : 0;
      out[i] = lo | hi << 16;
    }
  } else {
    load_words<u16, C, Bytes>(out, static_cast<const u16*>(row), column, columns, valid);
  }
}

// C columns of a row as values.
template <class E, int C, int Bytes>
KITSUNE_DEVICE void load_row(typename Element<E>::Value (&out)[C], const void* row, int column, int columns, bool valid) {
  using Bits = typename Element<E>::Bits;
  constexpr int kSize = sizeof(Bits);
  if constexpr (kSize == 2) {
    u32 pairs[C / 2];
    load_halves<C, Bytes>(pairs, row, column, columns, valid);
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = unpack<E>(pairs[c / 2], c & 1);
  } else if constexpr (Bytes == kStaged) {
    Bits raw[C];
    load_staged<Bits, C>(raw, static_cast<const Bits*>(row), column, columns);
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = Element<E>::load(raw[c]);
  } else if constexpr (Bytes == kInRing) {
    static_assert(kSize == 4, "rows of bytes are not copied to the ring");
    u32 words[C];
    load_ring_words<Bits, C>(words, static_cast<const Bits*>(row), column, columns);
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = Element<E>::load(words[c]);
  } else if constexpr (Bytes < 4) {
    const Bits* const from = static_cast<const Bits*>(row) + column;
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = Element<E>::load(valid && column + c < columns ? ld_global(from + c) : Bits(0));
  } else {
    u32 words[C * kSize / 4];
    load_words<Bits, C, Bytes>(words, static_cast<const Bits*>(row), column, columns, valid);
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c) out[c] = Element<E>::load(static_cast<Bits>(words[c * kSize / 4] >> c * kSize % 4 * 8));
  }
}

// The other way: C columns to a row of an array.
template <class E, int C, int Bytes>
KITSUNE_DEVICE void store_row(void* row, int column, int columns, bool valid, const typename Element<E>::Value (&in)[C]) {
  using Bits = typename Element<E>::Bits;
  constexpr int kSize = sizeof(Bits);
  if constexpr (Bytes < 4) {
    KITSUNE_UNROLL
    for (int c = 0; c < C; ++c)
      if (valid && column + c < columns) st_global(static_cast<Bits*>(row) + column + c, Element<E>::store(in[c]));
  } else {
    constexpr int kPerWord = 4 / kSize;
    u32 words[C / kPerWord];
    KITSUNE_UNROLL
    for (int i = 0; i < C / kPerWord; ++i) {
      if constexpr (kSize == 2) {
        words[i] = pack<E>(in[2 * i], in[2 * i + 1]);
      } else {
        words[i] = 0;
        KITSUNE_UNROLL
        for (int c = 0; c < kPerWord; ++c) words[i] |= static_cast<u32>(Element<E>::store(in[kPerWord * i + c])) << 8 * c;
      }
    }
    store_words<Bits, C, Bytes>(static_cast<Bits*>(row), column, columns, valid, words);
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

// The element of streamed arrays that row `row` of the stream is; 0 beyond the stream.
KITSUNE_DEVICE i64 row_of(const void* order, i64 row, bool valid) {
  return valid ? static_cast<i64>(ld_global(static_cast<const u32*>(order) + row)) : 0;
}

// The row of a table that an index says, the nearest one for an index that is out of range; or `otherwise` for such an index.
template <class Index>
KITSUNE_DEVICE const void* table_row(const void* table, Index index, i64 rows, i64 pitch) {
  const i64 i = static_cast<i64>(index);
  return static_cast<const u8*>(table) + (i < 0 ? 0 : i < rows ? i : rows - 1) * pitch;
}
template <class Index>
KITSUNE_DEVICE const void* table_row(const void* table, Index index, i64 rows, i64 pitch, const void* otherwise) {
  const i64 i = static_cast<i64>(index);
  return i >= 0 && i < rows ? static_cast<const u8*>(table) + i * pitch : otherwise;
}

// One element of a row.
template <class E, bool Shared = false>
KITSUNE_DEVICE typename Element<E>::Value load_one(const void* row, bool valid) {
  using Bits = typename Element<E>::Bits;
  const Bits* const from = static_cast<const Bits*>(row);
  return Element<E>::load(!valid ? Bits(0) : Shared ? ld_shared(from) : ld_global(from));
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
