// The matmul micro-kernel: a block of MR rows by one panel, accumulated in registers, with bias, activation and conversion at the
// store.
#pragma once

#include "epilogue.h"
#include "panel.h"

namespace kitsune::cpu::KITSUNE_ISA {

// Rows per block: as many accumulators as the register file holds beside two panel vectors and one broadcast.
#if defined(__AVX512F__)
constexpr int kBlockRows = 12;  // 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kBlockRows = 6;  // 12 of 16
#elif defined(__aarch64__)
constexpr int kBlockRows = 12;  // 24 of 32
#else
constexpr int kBlockRows = 4;  // 8 of 16
#endif

// One block: X rows and C rows start at x and c; `columns` of the panel are stored.
struct Block {
  const void* x;
  int64_t lda;
  const void* w;
  int64_t K;
  const void* bias;  // a whole panel's width, in the accumulator type
  void* c;
  int64_t ldc;
  int64_t columns;
  DType c_dtype;
  Activation act;
  float act_a, act_b;
  const char* next;   // of the panel that comes after this one: this block's share, asked for while it multiplies
  int64_t next_step;  // bytes of it per step of k
  bool adds;          // to what is in c, which is float32
  DType rounds;       // GemmArgs::rounds
  const float* late;  // where the sums are rounded: the bias, which is added behind that, or nullptr; `bias` is zeros then
};

// ---- How one step of k multiplies: the element types and the broadcast of X.

struct F32Step {
  using X = float;
  using A = VF;
  using S = float;
  static constexpr int kDepth = 1;
  static KITSUNE_INLINE VF weights(const char* w, int64_t step, int j) {
    return load_vector<VF>(w + (step * kPanelVectors + j) * kVectorBytes);
  }
  static KITSUNE_INLINE VF rows(const float* x) { return splat<VF>(*x); }
  static KITSUNE_INLINE VF multiply_add(VF acc, VF x, VF w) { return acc + x * w; }
};

struct F64Step {
  using X = double;
  using A = VD;
  using S = double;
  static constexpr int kDepth = 1;
  static KITSUNE_INLINE VD weights(const char* w, int64_t step, int j) {
    return load_vector<VD>(w + (step * kPanelVectors + j) * kVectorBytes);
  }
  static KITSUNE_INLINE VD rows(const double* x) { return splat<VD>(*x); }
  static KITSUNE_INLINE VD multiply_add(VD acc, VD x, VD w) { return acc + x * w; }
};

// Rows that one instruction multiplies together: blocks have whole units of them, but for the last.
template <class Step>
constexpr int kRowUnit = 1;

#if defined(__AVX512BF16__)
// VDPBF16PS adds two products per lane in f32. It treats denormal inputs as zero and flushes denormal results, whatever MXCSR says:
// the price of the native multiplication, below anything a bf16 network can resolve.
struct BF16Step {
  using X = BFloat16;
  using A = VF;
  using S = float;
  static constexpr int kDepth = 2;
  static KITSUNE_INLINE __m512bh weights(const char* w, int64_t step, int j) {
    return (__m512bh)load_vector<VI>(w + (step * kPanelVectors + j) * kVectorBytes);
  }
  static KITSUNE_INLINE __m512bh rows(const BFloat16* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  // The last row of an odd K: its partner in X belongs to someone else, and is taken as 0.
  static KITSUNE_INLINE __m512bh last_row(const BFloat16* x) { return (__m512bh)_mm512_set1_epi32(x->bits); }
  static KITSUNE_INLINE VF multiply_add(VF acc, __m512bh x, __m512bh w) { return (VF)_mm512_dpbf16_ps((__m512)acc, x, w); }
};
#endif

// ---- Storing a vector of the accumulator type as another type.

#if defined(__AVX512F__) || defined(KITSUNE_NEON)
constexpr bool kMaskedStores = true;  // or as good as masked
#else
constexpr bool kMaskedStores = false;
#endif

#if defined(__AVX512F__)
KITSUNE_INLINE void store_lanes(float* to, VF v, int64_t lanes) {
  _mm512_mask_storeu_ps(to, __mmask16((1u << lanes) - 1), (__m512)v);
}
KITSUNE_INLINE void store_lanes(Half* to, VF v, int64_t lanes) {
  _mm256_mask_storeu_epi16(to, __mmask16((1u << lanes) - 1), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
KITSUNE_INLINE __m256i round_to_bfloat16(VF v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh((__m512)v);  // flushes denormals, as VDPBF16PS has already done
#else
  __m512i u = (__m512i)v;
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
}
KITSUNE_INLINE void store_lanes(BFloat16* to, VF v, int64_t lanes) {
  _mm256_mask_storeu_epi16(to, __mmask16((1u << lanes) - 1), round_to_bfloat16(v));
}
KITSUNE_INLINE void store_lanes(double* to, VD v, int64_t lanes) {
  _mm512_mask_storeu_pd(to, __mmask8((1u << lanes) - 1), (__m512d)v);
}
#endif

#if defined(KITSUNE_NEON)
}  // namespace kitsune::cpu::KITSUNE_ISA
#include "neon.h"
namespace kitsune::cpu::KITSUNE_ISA {
#endif

// Vectors with a masked, converting store above.
template <class C, class V>
constexpr bool kStoresMasked = kMaskedStores && (kSame<V, VF> ? !kSame<C, double> : kSame<C, double>);

template <class C, int MR, int NV, class V>
KITSUNE_INLINE void store_block(const Block& b, const V (&acc)[MR][NV]) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(acc[0][0][0]);
  C* c = static_cast<C*>(b.c);
  const int64_t last = b.columns - (NV - 1) * kLanes;  // > 0: NV covers the columns, and one vector fewer does not
  KITSUNE_UNROLL
  for (int i = 0; i < MR; ++i) {
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) {
      if constexpr (kStoresMasked<C, V>) {
        store_lanes(c + j * kLanes, acc[i][j], j + 1 < NV ? kLanes : last);
      } else {
        store_vector(c + j * kLanes, acc[i][j]);
      }
    }
    c += b.ldc;
  }
}

// Everything else: the block's rows in memory, `width` apart, are converted or copied.
template <class S>
__attribute__((noinline)) void store_rows(const Block& b, int rows, int64_t width, const S* from) {
  with_float<int>(b.c_dtype, [&](auto tag) {
    using C = typename decltype(tag)::type;
    for (int i = 0; i < rows; ++i) {
      C* to = static_cast<C*>(b.c) + i * b.ldc;
      if constexpr (kSame<C, S>) {
        __builtin_memcpy(to, from + i * width, size_t(b.columns) * sizeof(C));
      } else {
        convert_dense(b.columns, to, from + i * width);
      }
    }
    return 0;
  });
}

template <int MR, int NV, class V>
KITSUNE_INLINE void store_any_block(const Block& b, const V (&acc)[MR][NV]) {
  using S = decltype(V{}[0] + 0);
  constexpr int64_t kWidth = NV * int64_t(sizeof(V) / sizeof(S));
  const bool whole = b.columns == kWidth || kMaskedStores;
  if (b.c_dtype == (kSame<S, float> ? DType::kF32 : DType::kF64) && whole) return store_block<S>(b, acc);
  if constexpr (kSame<S, float> && kMaskedStores) {
    if (b.c_dtype == DType::kBF16) return store_block<BFloat16>(b, acc);
    if (b.c_dtype == DType::kF16) return store_block<Half>(b, acc);
  }
  alignas(64) S buffer[MR * kWidth];
  __builtin_memcpy(buffer, &acc[0][0], sizeof buffer);
  store_rows<S>(b, MR, kWidth, buffer);
}

// The activation of sums in memory, `width` apart (whole vectors), and their store: a loop of its own, so that every activation is
// compiled once and not for each height of a block. The sums come from the first-level cache, which costs less than a cycle each.
template <class C, class F>
KITSUNE_INLINE void activate_rows(const Block& b, int rows, int64_t width, float* sums, F activation) {
  C* c = static_cast<C*>(b.c);
  for (int i = 0; i < rows; ++i, c += b.ldc, sums += width) {
    for (int64_t j = 0; j < b.columns; j += kFloats) {
      VF v = activation(load_vector<VF>(sums + j));
      if constexpr (kStoresMasked<C, VF>) {
        store_lanes(c + j, v, min_of(int64_t(kFloats), b.columns - j));
      } else {
        store_vector(sums + j, v);
      }
    }
  }
}

// C: what activate_rows stores, or another type than float32 and the 16-bit ones for sums that stay where they are.
template <class C>
KITSUNE_INLINE void activate_as(const Block& b, int rows, int64_t width, float* sums) {
  with_rounding(b.rounds, [&](auto round) {
    with_activation<C, decltype(round)>(b.act, b.act_a, b.act_b,
                                        [&](auto activation) { activate_rows<C>(b, rows, width, sums, activation); });
  });
  if constexpr (!kStoresMasked<C, VF>) store_rows<float>(b, rows, width, sums);
}

__attribute__((noinline)) inline void finish_rows(const Block& b, int rows, int64_t width, float* sums) {
  switch (b.c_dtype) {
    case DType::kBF16: return activate_as<BFloat16>(b, rows, width, sums);
    case DType::kF16: return activate_as<Half>(b, rows, width, sums);
    case DType::kF32: return activate_as<float>(b, rows, width, sums);
    default: return activate_as<double>(b, rows, width, sums);
  }
}

KITSUNE_INLINE VF load_lanes(const float* from, int64_t lanes) {
#if defined(__AVX512F__)
  return (VF)_mm512_maskz_loadu_ps(__mmask16((1u << lanes) - 1), from);
#else
  VF v{};
  __builtin_memcpy(&v, from, size_t(lanes) * sizeof(float));
  return v;
#endif
}

// acc[i][j] += what is in the block.
template <int MR, int NV>
KITSUNE_INLINE void add_stored(const Block& b, VF (&acc)[MR][NV]) {
  const float* c = static_cast<const float*>(b.c);
  const int64_t last = b.columns - (NV - 1) * kFloats;
  KITSUNE_UNROLL
  for (int i = 0; i < MR; ++i) {
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j)
      acc[i][j] += j + 1 < NV || last == kFloats ? load_vector<VF>(c + j * kFloats) : load_lanes(c + j * kFloats, last);
    c += b.ldc;
  }
}

// acc[i][j] rounded, plus the bias.
template <class Round, int MR, int NV>
KITSUNE_INLINE void round_block_to(const float* bias, VF (&acc)[MR][NV]) {
  KITSUNE_UNROLL
  for (int j = 0; j < NV; ++j) {
    const VF add = bias != nullptr ? load_vector<VF>(bias + j * kFloats) : splat<VF>(-0.0f);  // which changes nothing
    KITSUNE_UNROLL
    for (int i = 0; i < MR; ++i) acc[i][j] = Round::apply(acc[i][j]) + add;
  }
}

template <int MR, int NV>
KITSUNE_INLINE void round_block(const Block& b, VF (&acc)[MR][NV]) {
  b.rounds == DType::kBF16 ? round_block_to<ToBFloat16>(b.late, acc) : round_block_to<ToFloat16>(b.late, acc);
}

#if !defined(KITSUNE_NEON)
constexpr int64_t kStayingPanelBytes = 32 << 10;

template <int N>
struct StepsAhead {
  static constexpr int value = N;
};

// acc[i][j] += the sum over k of X's row i times W's vector j.
template <class Step, int MR, int NV>
KITSUNE_INLINE void accumulate(const Block& b, typename Step::A (&acc)[MR][NV]) {
  const typename Step::X* x = static_cast<const typename Step::X*>(b.x);
  const char* w = static_cast<const char*>(b.w);
  const int64_t lda = b.lda;
  const int64_t steps = b.K / Step::kDepth;
  const char* next = b.next;
  // A pointer for every third row: x86 addresses `near` + 0, 1 or 2 times lda, and a pointer for each row would not leave enough
  // registers (a spilt one came back through a vector register, whose move takes the place of a multiplication).
  constexpr int kNear = 3;
  const typename Step::X* row[(MR + kNear - 1) / kNear];
  KITSUNE_UNROLL
  for (int i = 0; i < MR; i += kNear) row[i / kNear] = x + i * lda;
  auto multiply = [&](auto ahead) {
    for (int64_t s = 0; s < steps; ++s) {
      decltype(Step::weights(w, s, 0)) wv[NV];
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) wv[j] = Step::weights(w, s, j);
      if constexpr (ahead.value > 0) {
        KITSUNE_UNROLL
        for (int j = 0; j < NV; ++j) __builtin_prefetch(w + ((s + ahead.value) * kPanelVectors + j) * kVectorBytes, 0, 3);
      }
      __builtin_prefetch(next, 0, 2);
      next += b.next_step;
      KITSUNE_UNROLL
      for (int i = 0; i < MR; ++i) {
        auto xv = Step::rows(row[i / kNear] + i % kNear * lda);
        KITSUNE_UNROLL
        for (int j = 0; j < NV; ++j) acc[i][j] = Step::multiply_add(acc[i][j], xv, wv[j]);
      }
      KITSUNE_UNROLL
      for (auto& p : row) p += Step::kDepth;
    }
  };
  // A panel that does not stay in the first-level cache comes from the second one again for every block of rows, and the hardware
  // asks for it too late: 64 rows by 512 x 1408 took 1.03 times as long without (Xeon with AMX).
  steps * kPanelVectors * kVectorBytes > kStayingPanelBytes ? multiply(StepsAhead<8>{}) : multiply(StepsAhead<0>{});
  if constexpr (Step::kDepth == 2) {
    if (b.K % 2) {
      KITSUNE_UNROLL
      for (int i = 0; i < MR; ++i) {
        auto xv = Step::last_row(x + i * lda + b.K - 1);
        KITSUNE_UNROLL
        for (int j = 0; j < NV; ++j) acc[i][j] = Step::multiply_add(acc[i][j], xv, Step::weights(w, steps, j));
      }
    }
  }
}
#endif

template <class Step, int MR, int NV>
__attribute__((noinline)) void multiply_block(const Block& b) {
  using V = typename Step::A;
  constexpr int kLanes = sizeof(V) / sizeof(typename Step::S);
  V acc[MR][NV];
  KITSUNE_UNROLL
  for (int j = 0; j < NV; ++j) {
    V bias = load_vector<V>(static_cast<const typename Step::S*>(b.bias) + j * kLanes);
    KITSUNE_UNROLL
    for (int i = 0; i < MR; ++i) acc[i][j] = bias;
  }
  accumulate<Step>(b, acc);
  if constexpr (kSame<V, VF>) {
    if (b.adds) add_stored(b, acc);
    if (b.rounds != DType::kF32) round_block(b, acc);
  }
  // What the result is stored as rounds it again, unless that is wider.
  const bool again = kSame<V, VF> && b.rounds != DType::kF32 && b.rounds != b.c_dtype;
  if (b.act == Activation::kRelu && !again) {
    KITSUNE_UNROLL
    for (int i = 0; i < MR; ++i) {
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] = Relu{}(acc[i][j]);
    }
  } else if constexpr (kSame<V, VF>) {
    if (b.act == Activation::kScale && !again) {
      KITSUNE_UNROLL
      for (int i = 0; i < MR; ++i) {
        KITSUNE_UNROLL
        for (int j = 0; j < NV; ++j) acc[i][j] = Scale{b.act_a}(acc[i][j]);
      }
    } else if (b.act != Activation::kNone || again) {
      constexpr int64_t kWidth = NV * kLanes;
      alignas(64) float sums[MR * kWidth];
      __builtin_memcpy(sums, &acc[0][0], sizeof sums);
      return finish_rows(b, MR, kWidth, sums);
    }
  }
  store_any_block(b, acc);
}

// The kernel for `rows` in 1..kBlockRows.
template <class Step, int NV, int MR = kBlockRows>
KITSUNE_INLINE void multiply_rows(int64_t rows, const Block& b) {
  if constexpr (MR >= 1) {
    if (rows == MR) return multiply_block<Step, MR, NV>(b);
    return multiply_rows<Step, NV, MR - 1>(rows, b);
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
