// What AArch64 has of its own for the micro-kernels: multiplication by a lane, BFMMLA, stores of part of a vector. Included by
// micro_kernel.h in the units that define KITSUNE_NEON.
//
// Multiplication by a lane wants a vector of X's elements in a register. A row of X offers neighbours along k, so a step takes two
// of them: 24 sums of a 12 x 8 block, 4 vectors of W and 2 pairs of X are 30 of the 32 registers, and 14 loads (LDP counts as one)
// bring the operands of 48 multiplications. In a weight gradient the neighbours are rows of the block: 4 loads for 24.
#pragma once

namespace kitsune::cpu::KITSUNE_ISA {

// ---- Multiplication by a lane.

// In a register: GCC would load each lane for itself, twice as many loads.
KITSUNE_INLINE float32x2_t load_two(const float* x) {
  float32x2_t two = vld1_f32(x);
  __asm__("" : "+w"(two));
  return two;
}
KITSUNE_INLINE float64x2_t load_two(const double* x) {
  float64x2_t two = vld1q_f64(x);
  __asm__("" : "+w"(two));
  return two;
}

template <int Lane>
KITSUNE_INLINE VF multiply_lane(VF acc, VF w, float32x2_t x) {
  return (VF)vfmaq_lane_f32((float32x4_t)acc, (float32x4_t)w, x, Lane);
}
template <int Lane>
KITSUNE_INLINE VF multiply_lane(VF acc, VF w, VF x) {
  return (VF)vfmaq_laneq_f32((float32x4_t)acc, (float32x4_t)w, (float32x4_t)x, Lane);
}
template <int Lane, class X>
KITSUNE_INLINE VD multiply_lane(VD acc, VD w, X x) {
  return (VD)vfmaq_laneq_f64((float64x2_t)acc, (float64x2_t)w, (float64x2_t)x, Lane);
}

template <class Step, int MR, int NV>
KITSUNE_INLINE void accumulate_lanes(const Block& b, typename Step::A (&acc)[MR][NV]) {
  using V = typename Step::A;
  using X = typename Step::X;
  const X* x = static_cast<const X*>(b.x);
  const char* w = static_cast<const char*>(b.w);
  const char* next = b.next;
  const int64_t K = b.K;
  const X* row[MR];
  KITSUNE_UNROLL
  for (int i = 0; i < MR; ++i) row[i] = x + i * b.lda;
  int64_t k = 0;
  for (; k + 2 <= K; k += 2) {
    V w0[NV], w1[NV];
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) w0[j] = Step::weights(w, 0, j), w1[j] = Step::weights(w, 1, j);
    w += 2 * kPanelVectors * kVectorBytes;
    __builtin_prefetch(next, 0, 2);
    next += 2 * b.next_step;
    KITSUNE_UNROLL
    for (int i = 0; i < MR; ++i) {
      auto two = load_two(row[i] + k);
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] = multiply_lane<0>(acc[i][j], w0[j], two);
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] = multiply_lane<1>(acc[i][j], w1[j], two);
    }
  }
  if (k < K) {
    KITSUNE_UNROLL
    for (int i = 0; i < MR; ++i) {
      V last = Step::rows(row[i] + k);
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] = Step::multiply_add(acc[i][j], last, Step::weights(w, 0, j));
    }
  }
}

// One vector of neighbours of X for the rows from I on of a block, and its lanes.
template <class Step, int MR, int NV, int I>
KITSUNE_INLINE void accumulate_neighbours(const typename Step::X* x, const typename Step::A (&w)[NV],
                                          typename Step::A (&acc)[MR][NV]) {
  using V = typename Step::A;
  constexpr int kLanes = sizeof(V) / sizeof(typename Step::X);
  if constexpr (I + kLanes <= MR) {
    V xv = load_vector<V>(x + I);
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) {
      acc[I][j] = multiply_lane<0>(acc[I][j], w[j], xv);
      acc[I + 1][j] = multiply_lane<1>(acc[I + 1][j], w[j], xv);
      if constexpr (kLanes == 4) {
        acc[I + 2][j] = multiply_lane<2>(acc[I + 2][j], w[j], xv);
        acc[I + 3][j] = multiply_lane<3>(acc[I + 3][j], w[j], xv);
      }
    }
    accumulate_neighbours<Step, MR, NV, I + kLanes>(x, w, acc);
  } else if constexpr (I < MR) {
    V xv = Step::rows(x + I);
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) acc[I][j] = Step::multiply_add(acc[I][j], xv, w[j]);
    accumulate_neighbours<Step, MR, NV, I + 1>(x, w, acc);
  }
}

template <class Step, int MR, int NV>
KITSUNE_INLINE void accumulate_outer_lanes(const typename Step::X* x, int64_t x_step, const char* panel, int64_t steps,
                                           typename Step::A (&acc)[MR][NV]) {
  for (int64_t s = 0; s < steps; ++s) {
    typename Step::A w[NV];
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) w[j] = Step::weights(panel, s, j);
    accumulate_neighbours<Step, MR, NV, 0>(x + s * x_step, w, acc);
  }
}

// ---- BFMMLA: a 2 x 2 block of f32 sums += 2 x 4 of bf16 times 4 x 2.

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

// A panel keeps four k of each column together, so that 16 bytes are the 4 x 2 operand of two columns. X's operand is four k of two
// rows; in a weight gradient four rows of two columns, which are brought together first.
//
// BFMMLA adds two products at a time to the sum. Whatever FPCR says, each of its two additions is rounded to odd (off by less than
// a unit in the last place of f32, not by half of one, and as often up as down) and denormal operands and results are zeros. So a
// sum of K products is within K 2^-23 of the sum of their magnitudes; sums of widened operands are within K 2^-24.
struct BF16Step {
  using X = BFloat16;
  using A = VF;
  using S = float;
  static constexpr int kDepth = 4;
};

template <>
constexpr int kRowUnit<BF16Step> = 2;

// The sums of MR rows and NV vectors of columns in blocks of 2 x 2; of an odd MR, the last row's partner is computed and left.
template <int MR, int NV>
struct PairSums {
  static constexpr int kPairs = (MR + 1) / 2, kColumns = 2 * NV;
  float32x4_t sums[kPairs][kColumns];

  KITSUNE_INLINE explicit PairSums(const VF (&acc)[MR][NV]) {
    KITSUNE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) {
        float64x2_t top = (float64x2_t)acc[2 * i][j], bottom = (float64x2_t)acc[2 * i + 1 < MR ? 2 * i + 1 : 2 * i][j];
        sums[i][2 * j] = (float32x4_t)vzip1q_f64(top, bottom);
        sums[i][2 * j + 1] = (float32x4_t)vzip2q_f64(top, bottom);
      }
    }
  }

  KITSUNE_INLINE void add(int i, uint64x2_t x, const uint64x2_t (&w)[kColumns]) {
    KITSUNE_UNROLL
    for (int j = 0; j < kColumns; ++j) sums[i][j] = vbfmmlaq_f32(sums[i][j], (bfloat16x8_t)x, (bfloat16x8_t)w[j]);
  }

  KITSUNE_INLINE void to_rows(VF (&acc)[MR][NV]) const {
    KITSUNE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) {
        float64x2_t left = (float64x2_t)sums[i][2 * j], right = (float64x2_t)sums[i][2 * j + 1];
        acc[2 * i][j] = (VF)vzip1q_f64(left, right);
        if (2 * i + 1 < MR) acc[2 * i + 1][j] = (VF)vzip2q_f64(left, right);
      }
    }
  }
};

KITSUNE_INLINE uint64x2_t load_quads(const void* p) { return load_vector<uint64x2_t>(p); }
KITSUNE_INLINE uint64x2_t join_quads(const BFloat16* top, const BFloat16* bottom) {
  return vcombine_u64(load_vector<uint64x1_t>(top), load_vector<uint64x1_t>(bottom));
}

// The last one to three k of a row; beyond them X's memory belongs to someone else, and is taken as 0.
KITSUNE_INLINE uint64_t last_quad(const BFloat16* x, int64_t count) {
  uint64_t quad = x[0].bits;
  if (count > 1) quad |= uint64_t(x[1].bits) << 16;
  if (count > 2) quad |= uint64_t(x[2].bits) << 32;
  return quad;
}

template <int MR, int NV>
KITSUNE_INLINE void accumulate_pairs(const Block& b, VF (&acc)[MR][NV]) {
  using Sums = PairSums<MR, NV>;
  constexpr int kPanelStep = 2 * kPanelVectors * kVectorBytes;  // bytes of four k
  const BFloat16* x = static_cast<const BFloat16*>(b.x);
  const char* w = static_cast<const char*>(b.w);
  const char* next = b.next;
  const int64_t steps = b.K / 4, rest = b.K % 4;
  const BFloat16* row[2 * Sums::kPairs];
  KITSUNE_UNROLL
  for (int i = 0; i < 2 * Sums::kPairs; ++i) row[i] = x + (i < MR ? i : i - 1) * b.lda;
  Sums sums(acc);
  uint64x2_t wv[Sums::kColumns];
  for (int64_t s = 0; s < steps; ++s) {
    KITSUNE_UNROLL
    for (int j = 0; j < Sums::kColumns; ++j) wv[j] = load_quads(w + j * kVectorBytes);
    w += kPanelStep;
    __builtin_prefetch(next, 0, 2);
    next += b.next_step;
    KITSUNE_UNROLL
    for (int i = 0; i < Sums::kPairs; ++i) {
      sums.add(i, join_quads(row[2 * i], row[2 * i + 1]), wv);
      row[2 * i] += 4, row[2 * i + 1] += 4;
    }
  }
  if (rest) {
    KITSUNE_UNROLL
    for (int j = 0; j < Sums::kColumns; ++j) wv[j] = load_quads(w + j * kVectorBytes);
    KITSUNE_UNROLL
    for (int i = 0; i < Sums::kPairs; ++i) {
      const uint64_t quads[2] = {last_quad(row[2 * i], rest), last_quad(row[2 * i + 1], rest)};
      sums.add(i, vld1q_u64(quads), wv);
    }
  }
  sums.to_rows(acc);
}

template <int MR, int NV>
KITSUNE_INLINE void accumulate_outer_pairs(const BFloat16* x, int64_t x_step, const char* panel, int64_t steps, VF (&acc)[MR][NV]) {
  using Sums = PairSums<MR, NV>;
  Sums sums(acc);
  for (int64_t s = 0; s < steps; ++s) {
    uint64x2_t wv[Sums::kColumns];
    KITSUNE_UNROLL
    for (int j = 0; j < Sums::kColumns; ++j) wv[j] = load_quads(panel + j * kVectorBytes);
    KITSUNE_UNROLL
    for (int i = 0; i < Sums::kPairs; ++i) sums.add(i, load_quads(x + 8 * i), wv);
    panel += 2 * kPanelVectors * kVectorBytes;
    x += x_step;
  }
  sums.to_rows(acc);
}
#endif

// acc[i][j] += the sum over k of X's row i times W's vector j.
template <class Step, int MR, int NV>
KITSUNE_INLINE void accumulate(const Block& b, typename Step::A (&acc)[MR][NV]) {
  if constexpr (Step::kDepth == 4) {
    accumulate_pairs(b, acc);
  } else {
    accumulate_lanes<Step>(b, acc);
  }
}

// acc[i][j] += the sum over s of x[s * x_step + i] times the panel's vector j of row s.
template <class Step, int MR, int NV>
KITSUNE_INLINE void accumulate_outer(const typename Step::X* x, int64_t x_step, const char* panel, int64_t steps,
                                     typename Step::A (&acc)[MR][NV]) {
  if constexpr (Step::kDepth == 4) {
    accumulate_outer_pairs(x, x_step, panel, steps, acc);
  } else {
    accumulate_outer_lanes<Step>(x, x_step, panel, steps, acc);
  }
}

// ---- Storing the first lanes of a vector.

template <class T, class V>
KITSUNE_INLINE void store_first(T* to, V v, int64_t lanes) {
  constexpr int kLanes = sizeof(V) / sizeof(T);
  if (lanes == kLanes) return store_vector(to, v);
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < lanes) to[i] = v[i];
  }
}

KITSUNE_INLINE void store_lanes(float* to, VF v, int64_t lanes) { store_first(to, v, lanes); }
KITSUNE_INLINE void store_lanes(double* to, VD v, int64_t lanes) { store_first(to, v, lanes); }
KITSUNE_INLINE void store_lanes(Half* to, VF v, int64_t lanes) {
  store_first(reinterpret_cast<uint16_t*>(to), (uint16x4_t)vcvt_f16_f32((float32x4_t)v), lanes);
}
KITSUNE_INLINE void store_lanes(BFloat16* to, VF v, int64_t lanes) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  uint16x4_t bits = (uint16x4_t)vcvt_bf16_f32((float32x4_t)v);
#else
  VU u = (VU)v;
  VU rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
  uint16x4_t bits = vmovn_u32((uint32x4_t)(v == v ? rounded : quiet));
#endif
  store_first(reinterpret_cast<uint16_t*>(to), bits, lanes);
}

}  // namespace kitsune::cpu::KITSUNE_ISA
