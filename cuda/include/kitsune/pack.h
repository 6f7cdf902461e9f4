// Packing: the images of weights and the vectors that a kernel reads, written from arrays in the user's layout by one launch.
//
// Comes in: a table of words (targets/cuda/packing.py writes it; `Packed` below names its fields) and the buffers of the call. Goes
// out: the images (chunks of 128 bytes of K by columns, permuted and swizzled: layout.h), vectors of 32-bit words, and arrays
// filled with one number. Invariants: every byte of a destination is written once, padding as zeros; a byte of the source that is
// no element of the table is not read.
//
// This is a kernel of its own in front of the other: the stream orders the two, so the other needs no grid barrier and keeps its
// registers and its launch, and the code is the same for every call, so it is compiled and loaded once.
//
// A warp takes jobs: 32 columns of one chunk (4 KB), 128 words of a vector, 4 KB of a fill. An element of a weight lies at
// `from + batch + iteration + k offset + column offset` of its array; the offsets are in tables, which have -1 for padding. So any
// permutation, pieces of K, slabs and groups of columns are data. Stores always fill whole sectors of 32 bytes. Loads are whole
// sectors where the columns of a row are neighbours in the array (lanes are columns: `across`), and of float32 where elements of K
// are; of 16-bit neighbours along K a load takes half a sector, and L1 has the other half. Where neither are neighbours, each
// element is a sector of its own.
#pragma once

#include "kitsune/global.h"

namespace kitsune {

constexpr u32 kPackThreads = 256;
constexpr u32 kPackMostBuffers = 511;  // with the table, all the pointers that a kernel may have
constexpr u32 kPackHeadWords = 4;      // images and jobs of the table, in front of its descriptors
constexpr u32 kVectorJob = 128;        // words of a job
constexpr u32 kFillJob = 4096;         // bytes of a job

// The elements of an array, or of what is made of them.
enum : u32 { kF32, kBf16, kF16, kWord, kBool, kI8, kU8, kI16, kU16 };
enum : u32 { kWeights, kVector, kFill };

// A descriptor: two words are a 64-bit number, the lower half first.
struct alignas(16) Packed {
  u32 kind, first;     // the first job
  u32 source, to;      // buffers
  u32 type, made;      // of the source's elements; what they are rounded to, for weights the type of the image
  U2 at;               // byte of the destination
  U2 from;             // element of the source
  u32 batches, count;  // table of the batches' elements (pairs of words); iterations
  U2 step;             // elements from one iteration to the next
  U2 batch_bytes;      // of the destination, likewise
  U2 step_bytes;
  u32 k, n;               // tables of offsets; of a vector, n is the table of its words, or 0
  u32 k_chunks, columns;  // of a weight; of a vector its words, in `columns`, and those that are not padding, in `k_chunks`
  u32 across, pattern;    // are lanes columns? Of a fill the number, of a vector the elements from one word to the next
  U2 bytes;               // of a fill
};
static_assert(sizeof(Packed) == 112, "packing.py writes 28 words");

struct PackParams {
  const u32* table;
  u8* buffers[kPackMostBuffers];
};

KITSUNE_DEVICE i64 wide(const U2* p) {
  const U2 v = ld_global(p);
  return static_cast<i64>(static_cast<u64>(v.y) << 32 | v.x);
}

// An element as a float, whatever the array's type.
KITSUNE_DEVICE float packed_float(u32 type, const u8* array, i64 at) {
  if (type == kBf16) return from_bf16(ld_global(reinterpret_cast<const u16*>(array) + at));
  if (type == kF16) return from_f16(ld_global(reinterpret_cast<const u16*>(array) + at));
  return from_bits(ld_global(reinterpret_cast<const u32*>(array) + at));
}

// To the nearest tf32, ties to even; NaN stays as it is. The tensor core truncates, and cvt.rna rounds ties away from zero.
KITSUNE_DEVICE u32 nearest_tf32(u32 v) {
  const bool nan = (v & 0x7fffffffu) > 0x7f800000u;
  return nan ? v : (v + 0xfffu + (v >> 13 & 1)) & ~0x1fffu;
}

// A word of a vector: floats as float32, rounded to `made` first; integers as 32-bit integers.
KITSUNE_DEVICE u32 packed_word(u32 type, u32 made, const u8* array, i64 at) {
  switch (type) {
    case kWord: return ld_global(reinterpret_cast<const u32*>(array) + at);
    case kBool: return ld_global(array + at) != 0;
    case kU8: return ld_global(array + at);
    case kI8: return static_cast<u32>(static_cast<i32>(static_cast<signed char>(ld_global(array + at))));
    case kU16: return ld_global(reinterpret_cast<const u16*>(array) + at);
    case kI16: return static_cast<u32>(static_cast<i32>(static_cast<short>(ld_global(reinterpret_cast<const u16*>(array) + at))));
    default: {
      const float v = packed_float(type, array, at);
      if (type == made) return bits(v);
      return bits(made == kBf16 ? rounded_to<Bf16>(v) : made == kF16 ? rounded_to<F16>(v) : v);
    }
  }
}

// 16 bytes of an image: elements of K at `k` in a column; `valid`: the column is not padding.
template <u32 Elements>
KITSUNE_DEVICE U4 packed_unit(u32 type, u32 made, const u8* column, const u32* k, bool valid) {
  i32 at[Elements];
  KITSUNE_UNROLL
  for (u32 i = 0; i < Elements / 4; ++i) {
    const U4 v = ld_global(reinterpret_cast<const U4*>(k) + i);
    at[4 * i] = static_cast<i32>(v.x), at[4 * i + 1] = static_cast<i32>(v.y);
    at[4 * i + 2] = static_cast<i32>(v.z), at[4 * i + 3] = static_cast<i32>(v.w);
  }
  u32 words[4];
  if constexpr (Elements == 4) {
    KITSUNE_UNROLL
    for (u32 i = 0; i < 4; ++i) words[i] = valid && at[i] >= 0 ? nearest_tf32(bits(packed_float(type, column, at[i]))) : 0;
  } else if (type == made) {
    const u16* const from = reinterpret_cast<const u16*>(column);
    const bool even = reinterpret_cast<u64>(from) % 4 == 0;
    KITSUNE_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      const i32 first = at[2 * i], second = at[2 * i + 1];
      if (valid && even && first >= 0 && first % 2 == 0 && second == first + 1) {  // neighbours of K, as one word
        words[i] = ld_global(reinterpret_cast<const u32*>(from + first));
      } else {
        const u32 lo = valid && first >= 0 ? ld_global(from + first) : 0;
        const u32 hi = valid && second >= 0 ? ld_global(from + second) : 0;
        words[i] = lo | hi << 16;
      }
    }
  } else {
    KITSUNE_UNROLL
    for (u32 i = 0; i < 4; ++i) {
      const float lo = valid && at[2 * i] >= 0 ? packed_float(type, column, at[2 * i]) : 0.0f;
      const float hi = valid && at[2 * i + 1] >= 0 ? packed_float(type, column, at[2 * i + 1]) : 0.0f;
      words[i] = made == kBf16 ? pack_bf16(lo, hi) : pack_f16(lo, hi);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

template <u32 Elements>
KITSUNE_DEVICE void pack_columns(const Packed* d, const u32* table, const u8* source, u8* to, u32 job) {
  const u32 columns = ld_global(&d->columns), k_chunks = ld_global(&d->k_chunks), count = ld_global(&d->count);
  const u32 groups = (columns + 31) / 32, group = job % groups, chunk = job / groups % k_chunks;
  const u32 matrix = job / groups / k_chunks, iteration = matrix % count, batch = matrix / count;
  const u32 type = ld_global(&d->type), made = ld_global(&d->made), size = type == kF32 ? 4 : 2;
  const i64 first =
      wide(&d->from) + wide(reinterpret_cast<const U2*>(table + ld_global(&d->batches)) + batch) + wide(&d->step) * iteration;
  const u32* const n = table + ld_global(&d->n) + 32 * group;
  const u32* const k = table + ld_global(&d->k) + chunk * (8 * Elements);
  const u8* const from = source + first * size;
  u8* const image = to + wide(&d->at) + wide(&d->batch_bytes) * batch + wide(&d->step_bytes) * iteration +
                    static_cast<i64>(chunk * columns + 32 * group) * 128;
  const u32 rows = columns < 32 ? columns : 32, lane = lane_id();
  const bool across = ld_global(&d->across) != 0;
  for (u32 i = 0; i < rows / 4; ++i) {
    // Across columns: two units of sixteen columns, whose order is that of memory (the inverse of the permutation in layout.h).
    const u32 c = lane / 2;
    const u32 row = across ? 8 * (c / 2 % 4) + 2 * (2 * (i / 4) + c / 8) + c % 2 : 4 * i + lane / 8;
    const u32 unit = across ? 2 * (i % 4) + lane % 2 : lane % 8;
    const i32 column = static_cast<i32>(ld_global(n + row));
    const U4 v = packed_unit<Elements>(type, made, from + static_cast<i64>(column) * size, k + unit * Elements, column >= 0);
    st_global(reinterpret_cast<U4*>(image + row * 128 + (unit ^ row % 8) * 16), v);
  }
}

KITSUNE_DEVICE void pack_vector(const Packed* d, const u32* table, const u8* source, u8* to, u32 job) {
  const u32 words = ld_global(&d->columns), there = ld_global(&d->k_chunks), n = ld_global(&d->n);
  const u32 type = ld_global(&d->type), made = ld_global(&d->made), step = ld_global(&d->pattern);
  const i64 from = wide(&d->from);
  u32* const out = reinterpret_cast<u32*>(to + wide(&d->at));
  for (u32 w = job * kVectorJob + lane_id(); w < words && w < (job + 1) * kVectorJob; w += 32) {
    const i32 at = n ? static_cast<i32>(ld_global(table + n + w)) : w < there ? static_cast<i32>(w * step) : -1;
    st_global(out + w, at >= 0 ? packed_word(type, made, source, from + at) : 0);
  }
}

KITSUNE_DEVICE void pack_fill(const Packed* d, u8* to, u32 job) {
  const u32 pattern = ld_global(&d->pattern);
  const i64 begin = static_cast<i64>(job) * kFillJob, all = wide(&d->bytes), left = all - begin;
  const i64 end = left < kFillJob ? left : kFillJob;
  u8* const out = to + wide(&d->at) + begin;
  for (i64 b = lane_id() * 16; b < end; b += 32 * 16) {
    if (b + 16 <= end) {
      st_global(reinterpret_cast<U4*>(out + b), U4{pattern, pattern, pattern, pattern});
    } else {
      for (i64 i = b; i < end; i += 2) {
        if (i + 2 <= end)
          st_global(reinterpret_cast<u16*>(out + i), static_cast<u16>(pattern >> i % 4 * 8));
        else
          st_global(out + i, static_cast<u8>(pattern));
      }
    }
  }
}

// By all threads of the grid. The descriptors are in the order of their first jobs.
KITSUNE_DEVICE void pack_all(const PackParams& p) {
  const u32* const table = p.table;
  const Packed* const images = reinterpret_cast<const Packed*>(table + kPackHeadWords);
  const u32 count = ld_global(table), jobs = ld_global(table + 1);
  for (u32 job = (block_id() * kPackThreads + thread_id()) / 32; job < jobs; job += grid_size() * (kPackThreads / 32)) {
    u32 low = 0, high = count;  // the last descriptor whose first job is not behind this one
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      if (ld_global(&images[middle].first) <= job)
        low = middle;
      else
        high = middle;
    }
    const Packed* const d = images + low;
    const u32 kind = ld_global(&d->kind), mine = job - ld_global(&d->first);
    const u8* const source = p.buffers[ld_global(&d->source)];
    u8* const to = p.buffers[ld_global(&d->to)];
    if (kind == kFill)
      pack_fill(d, to, mine);
    else if (kind == kVector)
      pack_vector(d, table, source, to, mine);
    else if (ld_global(&d->made) == kF32)
      pack_columns<4>(d, table, source, to, mine);
    else
      pack_columns<8>(d, table, source, to, mine);
  }
}

}  // namespace kitsune
