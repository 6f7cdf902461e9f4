// A product of two operands for each row of a tile: C = X Y^T of the row's own X [I, K] and Y [J, K].
//
// All operands of a tile do not fit shared memory (64 rows of 27 vectors of 128 16-bit numbers are 442 KB), so a warp takes its 16
// rows one after the other: it copies a row's operands into a *slot*, multiplies them with mma.sync, leaves the sums in shared
// memory, and from there they go to the tile's register image, all columns of the result or those that a list picks. With two
// slots the next row's operands are on their way (cp.async) while this row is multiplied. Rows are copied straight from the arrays
// and tables where they lie, by addresses that the threads which know them have left in shared memory; what the stage has computed
// itself comes from the warp's scratch rows. Only the warp's own rows take part, so warp barriers are enough.
#pragma once

#include "kitsune/stage/image.h"
#include "kitsune/stage/scratch.h"

namespace kitsune {

// The elements of an operand: their bits in memory and in a slot, and K of one mma.sync.
template <class T>
struct RowElement {
  using Bits = u16;
  static constexpr int kDepth = 16;
  static KITSUNE_DEVICE Bits of(u32 word) { return static_cast<Bits>(pack<T>(from_bits(word), 0.0f)); }
};
template <>
struct RowElement<Tf32> {
  using Bits = u32;
  static constexpr int kDepth = 8;
  static KITSUNE_DEVICE Bits of(u32 word) { return word; }
};

// Where an operand of `Free` times `Depth` elements lies in a slot. Its runs (of K, or where the operand lies `Across`, of the
// other dimension) are an odd multiple of 16 bytes apart, so that eight of them lie in different banks.
template <class T, int Free, int Depth, bool Across>
struct RowOperand {
  using Bits = typename RowElement<T>::Bits;
  static constexpr int kSize = sizeof(Bits), kRun = Across ? Free : Depth, kRuns = Across ? Depth : Free;
  static constexpr int kPitch = ((kRun * kSize + 15) / 16 | 1) * 16, kBytes = kRuns * kPitch;
  static constexpr int kStep = RowElement<T>::kDepth;
  // ldmatrix wants 8 elements together, and nothing left over: what lies between two runs was never written.
  static constexpr bool kMatrices = kSize == 2 && Depth % 16 == 0 && (!Across || Free % 8 == 0);

  u8* slot;

  KITSUNE_DEVICE u8* at(int element) const { return slot + element / kRun * kPitch + element % kRun * kSize; }
  KITSUNE_DEVICE Bits get(int free, int k) const {
    return free < Free && k < Depth ? ld_shared(reinterpret_cast<const Bits*>(at(Across ? k * Free + free : free * Depth + k)))
                                    : Bits(0);
  }
  // Elements k and k + 1 of a row of a 16-bit operand, or element k of a float32 one, as mma.sync wants them.
  KITSUNE_DEVICE u32 word(int free, int k) const {
    if constexpr (kSize == 2) {
      return get(free, k) | static_cast<u32>(get(free, k + 1)) << 16;
    } else {
      return to_tf32(from_bits(get(free, k)));
    }
  }
  // Rows beyond the last repeat it: their sums are dropped.
  KITSUNE_DEVICE const u8* matrix(int free, int k, int row) const {
    if constexpr (Across) {
      return slot + (k + row) * kPitch + (free < Free ? free : Free - 8) * kSize;
    } else {
      return slot + (free + row < Free ? free + row : Free - 1) * kPitch + k * kSize;
    }
  }
  KITSUNE_DEVICE void matrices(u32 (&r)[4], int free, int k, u32 swap) const {
    const int lane = static_cast<int>(lane_id()), inner = lane / 8 % 2 * 8, outer = lane / 16 * 8;
    const u8* const row = matrix(free + (swap ? outer : inner), k + (swap ? inner : outer), lane % 8);
    if constexpr (Across) {
      ldmatrix_x4_trans(r, row);
    } else {
      ldmatrix_x4(r, row);
    }
  }
  // 16 rows from `free` on as the A operand, 16 as two B operands.
  KITSUNE_DEVICE void a(u32 (&r)[4], int free, int k) const {
    if constexpr (kMatrices) {
      matrices(r, free, k, 0);
    } else {
      const int g = static_cast<int>(lane_id()) / 4, t = static_cast<int>(lane_id()) % 4, e = kSize == 2 ? 2 : 1;
      KITSUNE_UNROLL
      for (int i = 0; i < 4; ++i) r[i] = word(free + g + 8 * (i & 1), k + e * t + kStep / 2 * (i >> 1));
    }
  }
  KITSUNE_DEVICE void b(u32 (&r)[4], int free, int k) const {
    if constexpr (kMatrices) {
      matrices(r, free, k, 1);
    } else {
      const int g = static_cast<int>(lane_id()) / 4, t = static_cast<int>(lane_id()) % 4, e = kSize == 2 ? 2 : 1;
      KITSUNE_UNROLL
      for (int i = 0; i < 4; ++i) r[i] = word(free + g + 8 * (i >> 1), k + e * t + kStep / 2 * (i & 1));
    }
  }

  // The elements from `First` on are `Count` of each of `Pieces` rows, whose addresses `from` gives. In pieces of 16 bytes, which
  // arrive when the warp waits for them.
  template <int First, int Count, int Pieces, class From>
  KITSUNE_DEVICE void copy_async(From from) const {
    constexpr int kUnit = 16 / kSize, kUnits = Count / kUnit;
    static_assert(First % kUnit == 0 && Count % kUnit == 0 && kRun % kUnit == 0);
    KITSUNE_UNROLL
    for (int i = 0; i < Pieces * kUnits; i += 32) {
      const int u = i + static_cast<int>(lane_id());
      if (u < Pieces * kUnits) cp_async_16(at(First + u * kUnit), from(u / kUnits) + u % kUnits * 16, 16);
    }
  }
  // Element by element; `Staged`: the rows lie in shared memory.
  template <int First, int Count, int Pieces, bool Staged, class From>
  KITSUNE_DEVICE void copy(From from) const {
    KITSUNE_NO_UNROLL
    for (int i = static_cast<int>(lane_id()); i < Pieces * Count; i += 32) {
      const Bits* const p = reinterpret_cast<const Bits*>(from(i / Count)) + i % Count;
      st_shared(reinterpret_cast<Bits*>(at(First + i)), Staged ? ld_shared(p) : ld_global(p));
    }
  }
  // From a scratch row of the warp.
  template <int First, int Count>
  KITSUNE_DEVICE void copy_scratch(const u32* from) const {
    KITSUNE_UNROLL
    for (int i = 0; i < Count; i += 32) {
      const int c = i + static_cast<int>(lane_id());
      if (c < Count) st_shared(reinterpret_cast<Bits*>(at(First + c)), RowElement<T>::of(ld_shared(from + c)));
    }
  }
};

// Addresses of rows, which any thread of the warp may ask for: `Count` for each of its 16 rows.
template <int Count>
struct RowAddresses {
  static constexpr u32 kBytes = kGroupThreads / 32 * 16 * Count * 8;  // of a lane
  U2* base;                                                           // of this warp

  static KITSUNE_DEVICE RowAddresses at(u8* shared) {
    return {reinterpret_cast<U2*>(shared) + thread_id() % kGroupThreads / 32 * 16 * Count};
  }
  KITSUNE_DEVICE void keep(const Lane& lane, int number, const void* first, const void* second) const {
    if (lane.q < 2) {
      const u64 v = reinterpret_cast<u64>(lane.q == 0 ? first : second);
      st_shared(base + (lane.row % 16 + 8 * lane.q) * Count + number, U2{static_cast<u32>(v), static_cast<u32>(v >> 32)});
    }
  }
  KITSUNE_DEVICE const u8* get(int row, int number) const {
    const U2 v = ld_shared(base + row * Count + number);
    return reinterpret_cast<const u8*>(static_cast<u64>(v.y) << 32 | v.x);
  }
};

// Every column of a row's product, or those that a list picks; -1 stands for `fill`.
struct AllColumns {
  KITSUNE_DEVICE float get(const u32* sums, int column) const { return from_bits(ld_shared(sums + column)); }
};
struct PickedColumns {
  const float* list;
  float fill;
  KITSUNE_DEVICE float get(const u32* sums, int column) const {
    const i32 from = static_cast<i32>(bits(ld_global(list + column)));
    return from < 0 ? fill : from_bits(ld_shared(sums + from));
  }
};

// Row `row` of the warp, `Columns` numbers, to a register image of tiles of width W; the columns beyond them are zero. V is the
// element's type: Bf16, F16 or float.
template <class V, int W, int Columns, class Get>
KITSUNE_DEVICE void put_row(const Image& image, int row, Get get) {
  constexpr bool kHalf = sizeof(typename Element<V>::Bits) == 2;
  constexpr int kVectors = ((kHalf ? 1 : 2) * kOwned<W> + 3) / 4;  // of a block
  const u32 first = thread_id() % kGroupThreads / 32 * 32 + row % 8 * 4;
  U4* const lane_image = image.base - thread_id() % kGroupThreads;
  KITSUNE_UNROLL
  for (int i = 0; i < W / 2; i += 32) {
    const int pair = i + static_cast<int>(lane_id()), column = 2 * pair;
    if (pair >= W / 2) continue;
    float x[2];
    KITSUNE_UNROLL
    for (int e = 0; e < 2; ++e) x[e] = column + e < Columns ? get(column + e) : 0.0f;
    const int word = column % kOwned<W> + row / 8;  // the pair's number among those of its thread and block
    const u32 thread = first + column % kBlock<W> / kOwned<W>;
    const int in_block = kHalf ? word : 2 * word, vector = column / kBlock<W> * kVectors + in_block / 4;
    u32* const to = reinterpret_cast<u32*>(lane_image + vector * kGroupThreads + thread) + in_block % 4;
    if constexpr (kHalf) {
      st_shared(to, pack<V>(x[0], x[1]));
      if constexpr (kOwned<W> == 2) st_shared(to + 2, 0u);  // the vector has room for two more pairs
    } else {
      st_shared(reinterpret_cast<U2*>(to), U2{bits(x[0]), bits(x[1])});
    }
  }
}

// To a row of an array; null for a row beyond the stream. `Pairs`: two 16-bit elements at a time.
template <class V, int Columns, bool Pairs, class Get>
KITSUNE_DEVICE void store_product(const u8* row, Get get) {
  using Bits = typename Element<V>::Bits;
  if (row == nullptr) return;
  constexpr int kEach = Pairs && sizeof(Bits) == 2 && Columns % 2 == 0 ? 2 : 1;
  u8* const to = const_cast<u8*>(row);
  KITSUNE_NO_UNROLL
  for (int c = static_cast<int>(lane_id()) * kEach; c < Columns; c += 32 * kEach) {
    if constexpr (kEach == 2) {
      st_global(reinterpret_cast<u32*>(to) + c / 2, pack<V>(get(c), get(c + 1)));
    } else {
      st_global(reinterpret_cast<Bits*>(to) + c, Element<V>::store(get(c)));
    }
  }
}

// The work of a warp on its 16 rows. X is [I, K] and Y is [J, K], `XAcross` and `YAcross` as they lie; `Same`: Y is X. `Slots`: 1
// or 2.
template <class T, int I, int J, int K, bool XAcross, bool YAcross, bool Same, int Slots>
struct RowProduct {
  using X = RowOperand<T, I, K, XAcross>;
  using Y = RowOperand<T, J, K, YAcross>;
  static constexpr int kSlot = X::kBytes + (Same ? 0 : Y::kBytes), kSums = (I * J + 3) / 4 * 16;
  static constexpr u32 kBytes = kGroupThreads / 32 * (Slots * kSlot + kSums);  // of a lane
  u8* base;                                                                    // of this warp

  KITSUNE_DEVICE X x(int row) const { return {base + row % Slots * kSlot}; }
  KITSUNE_DEVICE Y y(int row) const { return {base + row % Slots * kSlot + (Same ? 0 : X::kBytes)}; }
  KITSUNE_DEVICE u32* sums() const { return reinterpret_cast<u32*>(base + Slots * kSlot); }

  // fill(row, x, y) sends for the operands of a row of the warp; put(row, sums) takes its product, [I][J].
  template <class Fill, class Put>
  KITSUNE_DEVICE void rows(Fill fill, Put put) const {
    syncwarp();
    if constexpr (Slots == 2) send(fill, 0);
    KITSUNE_NO_UNROLL
    for (int row = 0; row < 16; ++row) {
      if constexpr (Slots == 1) {
        send(fill, row);
        cp_async_wait<0>();
      } else if (row < 15) {
        send(fill, row + 1);
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      syncwarp();
      multiply(x(row), y(row));
      syncwarp();
      put(row, sums());
    }
    syncwarp();
  }

 private:
  static constexpr int kTogether = (K < 8 * X::kStep ? (K + X::kStep - 1) / X::kStep : 8) * X::kStep;  // of K, unrolled

  template <class Fill>
  KITSUNE_DEVICE void send(Fill fill, int row) const {
    fill(row, x(row), y(row));
    cp_async_commit();
  }
  KITSUNE_DEVICE void multiply(const X& x, const Y& y) const {
    KITSUNE_NO_UNROLL
    for (int i = 0; i < I; i += 16) {
      KITSUNE_NO_UNROLL
      for (int j = 0; j < J; j += 32) block<(J < 32 ? (J + 7) / 8 : 4)>(x, y, i, j);
    }
  }
  // 16 rows by `Tiles` times 8 columns.
  template <int Tiles>
  KITSUNE_DEVICE void block(const X& x, const Y& y, int i, int j) const {
    float sum[Tiles][4] = {};
    KITSUNE_NO_UNROLL
    for (int first = 0; first < K; first += kTogether) {
      KITSUNE_UNROLL
      for (int step = 0; step < kTogether; step += X::kStep) {
        const int k = first + step;
        if (K % kTogether != 0 && k >= K) continue;
        u32 a[4];
        x.a(a, i, k);
        KITSUNE_UNROLL
        for (int n = 0; n < Tiles; n += 2) {
          u32 b[4];
          y.b(b, j + 8 * n, k);
          KITSUNE_UNROLL
          for (int m = 0; m < 2; ++m) {
            const u32 pair[2] = {b[2 * m], b[2 * m + 1]};
            if (n + m < Tiles) mma<T>(sum[n + m < Tiles ? n + m : 0], a, pair);
          }
        }
      }
    }
    const int row = i + static_cast<int>(lane_id()) / 4, column = j + static_cast<int>(lane_id()) % 4 * 2;
    KITSUNE_UNROLL
    for (int n = 0; n < Tiles; ++n) KITSUNE_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int r = row + 8 * (e >> 1), c = column + 8 * n + (e & 1);
      if (r < I && c < J) st_shared(sums() + r * J + c, bits(sum[n][e]));
    }
  }
};

}  // namespace kitsune
