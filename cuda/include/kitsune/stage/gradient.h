// Weight gradients: X^T Y over all rows of the stream, accumulated in registers while tiles pass.
//
// Comes in: the two operands of every tile. Goes out: at the end, this CTA's part of the sum, and where it comes last, the sum of
// all parts in a fixed order. The rows of a tile are the K of the product, so both operands must lie across the layout that tiles
// have in registers: each lane leaves them in shared memory as *panels*, and every lane multiplies those of all lanes, for its own
// rows of the accumulators. 16-bit panels are what wgmma reads as MN-major operands, and ldmatrix transposed; float32 ones hold
// tf32 and are read word by word, because wgmma transposes 16-bit types only.
//
// Rows beyond the stream are zero in a panel, in both operands: zero times infinity would not be.
#pragma once

#include "kitsune/stage/sink.h"

namespace kitsune {

constexpr int kAllLanes = 4;           // the named barrier of all consumers; 1 to 3 are those of the lanes
constexpr int kPanelBlock = 64 * 128;  // bytes of 64 rows of 64 16-bit columns

template <class T>
constexpr bool kIsHalf = true;
template <>
constexpr bool kIsHalf<Tf32> = false;

// Where the lanes of a CTA keep their panels.
struct Panels {
  u8* base;  // lane 0's
  u32 stride;
  u32 group;
  KITSUNE_DEVICE u8* mine() const { return base + group * stride; }
};

// The panel's row of a tile's row: bits 0 and 2 of its number change places. Products sum over the rows, so any order will do that
// both operands share. In this one no store has a bank conflict: shared memory serves two neighbouring rows of a warp at a time
// (16-byte stores) or four (8-byte stores), and the swizzle keeps a block's columns of two rows in different banks only if bit 2 of
// the panel's rows differs, those of four rows if bits 1 and 2 do.
KITSUNE_DEVICE u32 panel_row(u32 row) { return (row & ~5u) | (row & 1) << 2 | (row >> 2 & 1); }

// 64 rows of W columns in shared memory. `put` takes a block of a tile as its owner has it.
template <class T, int W>
struct Panel {
  u8* base;

  // Block b of 16-bit values: pair 2 j + h is row h's columns 2 j, 2 j + 1 of those that the thread owns.
  KITSUNE_DEVICE void put(const Lane& lane, int b, const u32 (&pairs)[kOwned<W>], const bool (&valid)[2]) const {
    constexpr int kPairs = kOwned<W> / 2;
    const int column = first_column<W>(lane, b);
    // Opaque: else the compiler makes the addresses of all blocks in front of the loop over the tiles, or the steps, and spills.
    const u32 row = opaque(panel_row(lane.row));
    const u32 start = row * 128 + ((column % 64 / 8) ^ (row & 7)) * 16 + column % 8 * 2;
    KITSUNE_UNROLL
    for (int h = 0; h < 2; ++h) {
      u8* const at = base + column / 64 * kPanelBlock + start + h * 1024;  // 8 rows further on
      u32 v[kPairs];
      KITSUNE_UNROLL
      for (int j = 0; j < kPairs; ++j) v[j] = valid[h] ? pairs[2 * j + h] : 0;
      if constexpr (kPairs == 4) st_shared(reinterpret_cast<U4*>(at), U4{v[0], v[1], v[2], v[3]});
      if constexpr (kPairs == 2) st_shared(reinterpret_cast<U2*>(at), U2{v[0], v[1]});
      if constexpr (kPairs == 1) st_shared(reinterpret_cast<u32*>(at), v[0]);
    }
  }

  // What lies beyond the columns of the tile is multiplied, too, and its products are dropped: once, so that it is written at all.
  // `barrier`: the lane's.
  KITSUNE_DEVICE void clear(const Lane& lane, u32 barrier) const {
    for (int i = lane.thread; i < (W + 63) / 64 * kPanelBlock / 16; i += kGroupThreads)
      st_shared(reinterpret_cast<U4*>(base) + i, U4{0, 0, 0, 0});
    bar_sync(barrier, kGroupThreads);
  }
};

// No access has a bank conflict. Loads: the four threads that read 8 columns each of rows 2 t, t = 0 .. 3, are an odd multiple of 8
// banks apart. Stores: half of a warp writes 8 bytes of every thread's columns in four rows of the panel, an even number apart and
// so a multiple of 8 banks; the pairs of columns change places by the row, each row's to other banks. Stores of 16 bytes would want
// their registers four in a row, which spills more.
template <int W>
struct Panel<Tf32, W> {
  static constexpr int kPitch = W + 4;  // words
  u8* base;

  // The word of a row's column c of eight.
  static KITSUNE_DEVICE u32 swapped(u32 row, u32 c) { return c ^ (row & 6); }

  // Block b of float values: 2 (2 j + h) + e is row h's column 2 j + e of those that the thread owns.
  KITSUNE_DEVICE void put(const Lane& lane, int b, const float (&values)[2 * kOwned<W>], const bool (&valid)[2]) const {
    constexpr int kPairs = kOwned<W> / 2;
    const int column = first_column<W>(lane, b);
    KITSUNE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const u32 row = panel_row(lane.row) + 8 * h;
      u32 v[2 * kPairs];
      KITSUNE_UNROLL
      for (int c = 0; c < 2 * kPairs; ++c) v[c] = valid[h] ? to_tf32(values[2 * (c / 2 * 2 + h) + c % 2]) : 0;
      u32* const at = reinterpret_cast<u32*>(base) + row * kPitch + column / 8 * 8;
      KITSUNE_UNROLL
      for (int c = 0; c < 2 * kPairs; c += 2)
        st_shared(reinterpret_cast<U2*>(at + swapped(row, column % 8 + c)), U2{v[c], v[c + 1]});
    }
  }
  KITSUNE_DEVICE void clear(const Lane& lane, u32 barrier) const {
    for (int i = lane.thread; i < 64 * kPitch; i += kGroupThreads) st_shared(reinterpret_cast<u32*>(base) + i, u32{0});
    bar_sync(barrier, kGroupThreads);
  }
};

// The part of a product that one lane accumulates: blocks `first` to `first + Blocks - 1` of 64 columns of X, by N columns of Y.
// `All` blocks exist; a lane that would go beyond them repeats the last one and does not store it.
template <class T, int XW, int YW, int Blocks, int All, int N, int Lanes>
struct Gradient {
  const u8* x;  // lane 0's panels
  const u8* y;
  u32 stride;  // bytes from one lane's panels to the next's
  u32 first;

  KITSUNE_DEVICE u32 block(int m) const { return first + m < All ? first + m : All - 1; }

  // The panels of all lanes are complete when this begins, and may be written again when it returns.
  // `meanwhile` reads panels, too: it runs beside the tensor core where that works on its own.
  template <class F>
  KITSUNE_DEVICE void add(float (&sum)[Blocks][N / 2], F meanwhile) const {
#if KITSUNE_SM >= 900
    if constexpr (kIsHalf<T>) fence_proxy_async();
#endif
    bar_sync(kAllLanes, Lanes * kGroupThreads);
    if constexpr (!kIsHalf<T>) {
      multiply_words(sum);
      meanwhile();
    } else {
      multiply_halves(sum, meanwhile);
    }
    bar_sync(kAllLanes, Lanes * kGroupThreads);
  }

 private:
#if KITSUNE_SM >= 900
  template <class F>
  KITSUNE_DEVICE void multiply_halves(float (&sum)[Blocks][N / 2], F meanwhile) const {
    KITSUNE_UNROLL
    for (int m = 0; m < Blocks; ++m) pin(sum[m]);
    wgmma_fence();
    const u32 zero = opaque(0u);  // else the descriptors, two registers each, are made once and lie in registers, or are spilled
    KITSUNE_UNROLL
    for (int l = 0; l < Lanes; ++l) {
      const u64 b = desc_mn128(y + (l * stride + zero), kPanelBlock, 1024);
      KITSUNE_UNROLL
      for (int m = 0; m < Blocks; ++m) {
        const u64 a = desc_mn128(x + (l * stride + block(m) * kPanelBlock + zero), kPanelBlock, 1024);
        KITSUNE_UNROLL
        for (int k = 0; k < 4; ++k) wgmma_ss<T, N, true, true>(sum[m], a + k * 128, b + k * 128, true);  // 16 rows are 2048 bytes
      }
    }
    wgmma_commit();
    meanwhile();
    wgmma_wait<0>();
    KITSUNE_UNROLL
    for (int m = 0; m < Blocks; ++m) pin(sum[m]);
  }
#else
  // Fragments of 16 rows of the tile: ldmatrix transposes 8 x 8 of them on the way.
  template <class F>
  KITSUNE_DEVICE void multiply_halves(float (&sum)[Blocks][N / 2], F meanwhile) const {
    const u32 lane = lane_id(), warp = thread_id() % kGroupThreads / 32;
    KITSUNE_NO_UNROLL
    for (int step = 0; step < Lanes * 4; ++step) {
      const u8* const tile_x = x + step / 4 * stride;
      const u8* const tile_y = y + step / 4 * stride;
      const u32 k = step % 4 * 16;
      u32 a[Blocks][4];
      KITSUNE_UNROLL
      for (int m = 0; m < Blocks; ++m)
        ldmatrix_x4_trans(a[m], at(tile_x, k + lane / 16 * 8 + lane % 8, block(m) * 64 + warp * 16 + lane / 8 % 2 * 8));
      KITSUNE_UNROLL
      for (int n = 0; n < N; n += 16) {
        u32 b[4];
        ldmatrix_x4_trans(b, at(tile_y, k + lane / 8 % 2 * 8 + lane % 8, n + lane / 16 * 8));
        KITSUNE_UNROLL
        for (int m = 0; m < Blocks; ++m) KITSUNE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const u32 pair[2] = {b[2 * half], b[2 * half + 1]};
          multiply_8(sum[m], n / 8 + half, a[m], pair);
        }
      }
    }
    meanwhile();
  }
  static KITSUNE_DEVICE const u8* at(const u8* panel, u32 row, u32 column) {
    return panel + column / 64 * kPanelBlock + row * 128 + ((column % 64 / 8) ^ (row & 7)) * 16;
  }
#endif
  KITSUNE_DEVICE void multiply_words(float (&sum)[Blocks][N / 2]) const {
    const u32 lane = lane_id(), t = lane % 4, warp = thread_id() % kGroupThreads / 32;
    const u32 g = Panel<T, XW>::swapped(2 * t, lane / 4);
    KITSUNE_NO_UNROLL
    for (int step = 0; step < Lanes * 8; ++step) {
      const u32 row = step % 8 * 8 + 2 * t;  // the fragment's row t of eight, whose t + 4 is row + 1: the sum's order is free
      const u32* const tile_x = reinterpret_cast<const u32*>(x + step / 8 * stride) + row * Panel<T, XW>::kPitch;
      const u32* const tile_y = reinterpret_cast<const u32*>(y + step / 8 * stride) + row * Panel<T, YW>::kPitch;
      u32 a[Blocks][4];
      KITSUNE_UNROLL
      for (int m = 0; m < Blocks; ++m) KITSUNE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const u32 column = block(m) * 64 + warp * 16 + g + 8 * (i & 1);
        a[m][i] = column < XW ? ld_shared(tile_x + (i >> 1) * Panel<T, XW>::kPitch + column) : 0;
      }
      KITSUNE_UNROLL
      for (int n = 0; n < N / 8; ++n) {
        const u32 b[2] = {ld_shared(tile_y + n * 8 + g), ld_shared(tile_y + Panel<T, YW>::kPitch + n * 8 + g)};
        KITSUNE_UNROLL
        for (int m = 0; m < Blocks; ++m) multiply_8(sum[m], n, a[m], b);
      }
    }
  }
  // Columns 8 n .. 8 n + 7.
  static KITSUNE_DEVICE void multiply_8(float (&sum)[N / 2], int n, const u32 (&a)[4], const u32 (&b)[2]) {
    float c[4] = {sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]};
    mma<T>(c, a, b);
    sum[4 * n] = c[0], sum[4 * n + 1] = c[1], sum[4 * n + 2] = c[2], sum[4 * n + 3] = c[3];
  }

 public:
  // This lane's part of the CTA's sum, to the CTA's rows of partial results: [row][N].
  KITSUNE_DEVICE void store(u32* partial, const Lane& lane, const float (&sum)[Blocks][N / 2]) const {
    KITSUNE_UNROLL
    for (int m = 0; m < Blocks; ++m) {
      if (first + m >= All) continue;
      KITSUNE_UNROLL
      for (int i = 0; i < N / 2; i += 2) {
        const u32 row = (first + m) * 64 + lane.row + 8 * (i / 2 % 2), column = i / 4 * 8 + lane.q * 2;
        st_global(reinterpret_cast<U2*>(partial + row * N + column), U2{bits(sum[m][i]), bits(sum[m][i + 1])});
      }
    }
  }
};

// Sums over the rows of a 16-bit operand, such as the gradient of a bias, from its panels: each lane adds up its share of the
// columns over the panels of all lanes. In a tile's own registers they would take one for every four columns.
template <class T, int W, int Lanes>
struct PanelSums {
  static constexpr u32 kPairs = (W / 2 + Lanes - 1) / Lanes;  // of columns, that a lane has
  static constexpr int kRounds = (kPairs + kGroupThreads - 1) / kGroupThreads;
  const u8* panels;
  u32 stride;
  u32 group;

  // This thread's pair of columns in a round; W / 2 for none.
  KITSUNE_DEVICE u32 pair(int round) const {
    const u32 mine = round * kGroupThreads + thread_id() % kGroupThreads, p = group * kPairs + mine;
    return mine < kPairs && p < W / 2 ? p : W / 2;
  }
  KITSUNE_DEVICE void add(float (&sum)[2 * kRounds]) const {
    KITSUNE_UNROLL
    for (int i = 0; i < kRounds; ++i) {
      const u32 p = opaque(pair(i));  // as in Panel::put
      if (p == W / 2) continue;
      for (int l = 0; l < Lanes; ++l) {
        const u8* const panel = panels + l * stride + p / 32 * kPanelBlock + p % 4 * 4;
        KITSUNE_NO_UNROLL
        for (u32 row = 0; row < 64; row += 8) {
          KITSUNE_UNROLL
          for (u32 r = 0; r < 8; ++r) {
            const u32 v = ld_shared(reinterpret_cast<const u32*>(panel + (row + r) * 128 + (p % 32 / 4 ^ r) * 16));
            sum[2 * i] += unpack<T>(v, 0), sum[2 * i + 1] += unpack<T>(v, 1);
          }
        }
      }
    }
  }
  KITSUNE_DEVICE void store(u32* partial, const float (&sum)[2 * kRounds]) const {
    KITSUNE_UNROLL
    for (int i = 0; i < kRounds; ++i)
      if (pair(i) != W / 2) st_global(reinterpret_cast<U2*>(partial) + pair(i), U2{bits(sum[2 * i]), bits(sum[2 * i + 1])});
  }
  // The last lane's work on its columns: `parts` rows of W partial sums, to `columns` numbers.
  template <class E>
  KITSUNE_DEVICE void combine(void* out, const u32* partial, u32 parts, u32 columns) const {
    for (int i = 0; i < 2 * kRounds; ++i) {
      const u32 p = pair(i / 2), c = 2 * p + i % 2;
      if (p == W / 2 || c >= columns) continue;
      float sum = 0.0f;
      for (u32 part = 0; part < parts; ++part) sum += from_bits(ld_l2(partial + part * W + c));
      st_global(static_cast<typename Element<E>::Bits*>(out) + c, Element<E>::store(typename Element<E>::Value(sum)));
    }
  }
};

// The last lane's work on its rows of a gradient: [part][rows of all blocks][N] of partial sums, added up in order. `Swapped`: X
// was the second operand. The result is [first operand's columns][second's], `columns` of Y from `column0` on are here.
template <class E, bool Swapped, int Blocks, int All, int N>
KITSUNE_DEVICE void combine_gradient(void* out, const u32* partial, u32 parts, u32 first, int rows, int columns, int column0,
                                     int pitch) {
  using Bits = typename Element<E>::Bits;
  const int begin = static_cast<int>(first) * 64, end = begin + Blocks * 64 < rows ? begin + Blocks * 64 : rows;
  const int groups = (columns + 3) / 4;  // of four columns: 16-byte loads
  for (int i = static_cast<int>(thread_id() % kGroupThreads); i < (end - begin) * groups; i += kGroupThreads) {
    const int row = begin + i / groups, column = i % groups * 4;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 p = 0; p < parts; ++p) {
      const U4 v = ld_l2(reinterpret_cast<const U4*>(partial + (static_cast<i64>(p) * All * 64 + row) * N + column));
      sum[0] += from_bits(v.x), sum[1] += from_bits(v.y), sum[2] += from_bits(v.z), sum[3] += from_bits(v.w);
    }
    KITSUNE_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (column + j >= columns) continue;
      const i64 at =
          Swapped ? static_cast<i64>(column0 + column + j) * pitch + row : static_cast<i64>(row) * pitch + column0 + column + j;
      st_global(static_cast<Bits*>(out) + at, Element<E>::store(typename Element<E>::Value(sum[j])));
    }
  }
}

}  // namespace kitsune
