// Panels: how a weight W[K][N] is laid out for the matmul micro-kernels, and the packing of weights into them.
//
// A panel holds `width` columns of W, row after row: element (k, n) of panel p is W[k][p * width + n]. bf16 panels interleave D
// rows, two as VDPBF16PS wants them or four as BFMMLA does: (k, n) is at ((k / D) * width + n) * D + k % D. K is padded to the
// k-step, N to the width, with zeros.
#pragma once

#include "load_store.h"
#if defined(KITSUNE_NEON)
#include "neon_interleave.h"
#endif

namespace kitsune::cpu::KITSUNE_ISA {

#if defined(KITSUNE_NATIVE_BF16)
constexpr bool kNativeBFloat16 = true;
#else
constexpr bool kNativeBFloat16 = false;
#endif

// The k of a kBF16 panel that lie together, column by column: what one step of the ISA's instruction adds up.
#if defined(KITSUNE_NEON)
constexpr int kBFloat16Depth = 4;
#else
constexpr int kBFloat16Depth = 2;
#endif

constexpr int kPanelVectors = 2;
constexpr int kPanelFloats = kPanelVectors * kFloats;    // columns of a kF32 or kBF16 panel
constexpr int kPanelDoubles = kPanelVectors * kDoubles;  // columns of a kF64 panel

inline int panel_width(Panel p) { return p == Panel::kF64 ? kPanelDoubles : kPanelFloats; }

inline int64_t padded_depth(Panel p, int64_t K) {
  return p == Panel::kBF16 ? (K + kBFloat16Depth - 1) / kBFloat16Depth * kBFloat16Depth : K;
}

inline size_t panel_bytes(Panel p, int64_t K) {
  size_t element = p == Panel::kF64 ? 8 : p == Panel::kF32 ? 4 : 2;
  return size_t(padded_depth(p, K)) * size_t(panel_width(p)) * element;  // a multiple of the vector size
}

inline Panel panel_for(DType weight, Product product, const ProductShape&) {
  if (weight == DType::kF64) return Panel::kF64;
  return weight == DType::kBF16 && kNativeBFloat16 && product != Product::kWidened ? Panel::kBF16 : Panel::kF32;
}

inline int64_t panel_count(Panel p, int64_t N) { return (N + panel_width(p) - 1) / panel_width(p); }

inline size_t packed_bytes(Panel p, int64_t K, int64_t N) { return size_t(panel_count(p, N)) * panel_bytes(p, K); }

// Offset of element (k, n) within a panel of `width` columns.
template <int Depth>
KITSUNE_INLINE int64_t panel_offset(int64_t k, int64_t n, int64_t width) {
  return ((k / Depth) * width + n) * Depth + k % Depth;
}

// Two rows of 16 bits side by side, as VDPBF16PS wants pairs of k: to[j] is a[j] below b[j]. No b: zeros.
KITSUNE_INLINE void join_pairs(int64_t n, const BFloat16* a, const BFloat16* b, BFloat16* to) {
  uint32_t* pair = reinterpret_cast<uint32_t*>(to);
  if (b) {
    for (int64_t j = 0; j < n; ++j) pair[j] = uint32_t(a[j].bits) | uint32_t(b[j].bits) << 16;
  } else {
    for (int64_t j = 0; j < n; ++j) pair[j] = a[j].bits;
  }
}

// A matrix of 16 x 16 words, transposed. Both lie at multiples of 64 bytes.
#if defined(__AVX512F__)
KITSUNE_INLINE void transpose_words(const uint32_t* from, uint32_t* to) {
  __m512i a[16], b[16];
  KITSUNE_UNROLL
  for (int i = 0; i < 16; ++i) a[i] = _mm512_load_si512(from + i * 16);
  KITSUNE_UNROLL
  for (int i = 0; i < 16; i += 2) {  // within each 128 bits: words of neighbours, then pairs of words
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  KITSUNE_UNROLL
  for (int i = 0; i < 16; i += 4) {  // a[i + c]: column c of each 128 bits, of rows i .. i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  KITSUNE_UNROLL
  for (int c = 0; c < 4; ++c) {  // the 128 bits themselves, a 4 x 4 matrix for each c
    __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
    __m512i even2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88), odd2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_store_si512(to + c * 16, _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_store_si512(to + (4 + c) * 16, _mm512_shuffle_i32x4(odd, odd2, 0x88));
    _mm512_store_si512(to + (8 + c) * 16, _mm512_shuffle_i32x4(even, even2, 0xdd));
    _mm512_store_si512(to + (12 + c) * 16, _mm512_shuffle_i32x4(odd, odd2, 0xdd));
  }
}
#else
inline void transpose_words(const uint32_t* from, uint32_t* to) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[j * 16 + i] = from[i * 16 + j];
}
#endif

// A weight that is contiguous along k (a transposed one): blocks of 16 columns by 16 words of k are transposed in registers. False
// where it is not that.
template <int Depth, class To, class From>
bool pack_transposed(const PackSource& s, int64_t n0, int64_t width, int64_t columns, To* out) {
  constexpr int64_t kWords = 16, kRun = kWords * Depth;
  if (sizeof(To) * Depth != sizeof(uint32_t) || width % kWords || s.K < kRun) return false;
  for (int64_t k = 1; k < s.K; ++k)
    if (s.k_offset[k] != s.k_offset[0] + k) return false;
  const From* src = static_cast<const From*>(s.src) + s.k_offset[0];
  const int64_t* n_offset = s.n_offset + n0;
  uint32_t* panel = reinterpret_cast<uint32_t*>(out);
  alignas(64) uint32_t by_column[kWords * kWords], by_row[kWords * kWords];
  for (int64_t j0 = 0; j0 < columns; j0 += kWords) {
    const int64_t here = min_of(kWords, columns - j0);
    for (int64_t k0 = 0; k0 < s.K; k0 += kRun) {
      const int64_t run = min_of(kRun, s.K - k0);
      if (here < kWords || run < kRun) __builtin_memset(by_column, 0, sizeof by_column);
      for (int64_t j = 0; j < here; ++j) {
        const From* column = src + n_offset[j0 + j] + k0;
        if (n0 + j0 + kWords + j < s.N) __builtin_prefetch(src + n_offset[j0 + kWords + j] + k0);  // of the next block
        To* to = reinterpret_cast<To*>(by_column + j * kWords);
        if constexpr (kSame<To, From>) {
          if (run == kRun) {  // a copy of constant size is one vector
            __builtin_memcpy(static_cast<void*>(to), column, size_t(kRun) * sizeof(To));
          } else {
            __builtin_memcpy(static_cast<void*>(to), column, size_t(run) * sizeof(To));
          }
        } else {
          convert_dense(run, to, column);
        }
      }
      transpose_words(by_column, by_row);
      const int64_t rows = (run + Depth - 1) / Depth;
      for (int64_t r = 0; r < rows; ++r)
        __builtin_memcpy(panel + (k0 / Depth + r) * width + j0, by_row + r * kWords, kWords * sizeof(uint32_t));
    }
  }
  return true;
}

constexpr int64_t kRowsAhead = 16;  // of a weight that is packed: its rows may lie far from each other

template <class T>
KITSUNE_INLINE void prefetch_elements(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / int64_t(sizeof(T));
  for (int64_t j = 0; j < n; j += kLine) __builtin_prefetch(from + j);
}

template <int Depth, class To, class From>
void pack_panel(const PackSource& s, int64_t n0, int64_t width, int64_t depth, To* out) {
  const From* src = static_cast<const From*>(s.src);
  int64_t columns = min_of(width, s.N - n0);
  const int64_t* n_offset = s.n_offset + n0;
  bool dense = true;
  for (int64_t j = 1; j < columns; ++j) dense &= n_offset[j] == n_offset[0] + j;
  if (columns < width || depth > s.K) __builtin_memset(static_cast<void*>(out), 0, size_t(depth * width) * sizeof(To));
  int64_t done = 0;  // rows that are packed
  if constexpr (Depth == 2 && kSame<To, BFloat16> && kSame<From, BFloat16>) {
    if (dense) {
      for (int64_t k = 0; k < s.K; k += 2) {
        const From* row = src + n_offset[0];
        const From* below = k + 1 < s.K ? row + s.k_offset[k + 1] : nullptr;
        To* to = out + k * width;
        if (columns == kPanelFloats) {  // a loop of constant length is a few vectors
          join_pairs(kPanelFloats, row + s.k_offset[k], below, to);
        } else {
          join_pairs(columns, row + s.k_offset[k], below, to);
        }
      }
      return;
    }
  }
#if defined(KITSUNE_NEON)
  if constexpr (Depth == 4 && kSame<To, BFloat16> && kSame<From, BFloat16>) {
    for (; dense && done + 4 <= s.K; done += 4) {
      const int64_t* at = s.k_offset + done;
      const From *from = src + n_offset[0], *const row[4] = {from + at[0], from + at[1], from + at[2], from + at[3]};
      interleave_four(row, columns, out + done * width);
    }
  }
#endif
  if (dense) {
    for (int64_t k = done; k < s.K; ++k) {
      const From* row = src + s.k_offset[k] + n_offset[0];
      To* to = out + panel_offset<Depth>(k, 0, width);
      if (k + kRowsAhead < s.K) prefetch_elements(src + s.k_offset[k + kRowsAhead] + n_offset[0], columns);
      if constexpr (Depth > 1) {
        for (int64_t j = 0; j < columns; ++j) to[Depth * j] = convert<To>(row[j]);
      } else if (kSame<To, From> && columns == kPanelFloats) {  // a copy of constant size is a few vectors
        __builtin_memcpy(static_cast<void*>(to), row, kPanelFloats * sizeof(To));
      } else {
        convert_dense(columns, to, row);
      }
    }
    return;
  }
  if constexpr (kSame<To, From> || Depth == 1) {
    if (pack_transposed<Depth, To, From>(s, n0, width, columns, out)) return;
  }
  // Anything else: short runs of k per column keep both sides in the cache.
  constexpr int64_t kRun = 16;
  for (int64_t k0 = 0; k0 < s.K; k0 += kRun) {
    int64_t k1 = min_of(k0 + kRun, s.K);
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t k = k0; k < k1; ++k) {
        out[panel_offset<Depth>(k, j, width)] = convert<To>(src[s.k_offset[k] + n_offset[j]]);
      }
    }
  }
}

template <int Depth, class To>
void pack_panels(Panel panel, const PackSource& s, int64_t begin, int64_t end, void* out) {
  int64_t width = panel_width(panel), depth = padded_depth(panel, s.K);
  size_t bytes = panel_bytes(panel, s.K);
  with_float<int>(s.dtype, [&](auto tag) {
    using From = typename decltype(tag)::type;
    if constexpr (!kSame<To, BFloat16> || kSame<From, BFloat16>) {  // weights are widened, but never narrowed
      for (int64_t p = begin; p < end; ++p) {
        To* to = reinterpret_cast<To*>(static_cast<char*>(out) + size_t(p) * bytes);
        pack_panel<Depth, To, From>(s, p * width, width, depth, to);
      }
    }
    return 0;
  });
}

inline void pack(Panel panel, const PackSource& s, int64_t begin, int64_t end, void* out) {
  switch (panel) {
    case Panel::kF32: return pack_panels<1, float>(panel, s, begin, end, out);
    case Panel::kBF16: return pack_panels<kBFloat16Depth, BFloat16>(panel, s, begin, end, out);
    case Panel::kF64: return pack_panels<1, double>(panel, s, begin, end, out);
    case Panel::kTiles: return;  // amx.h
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
