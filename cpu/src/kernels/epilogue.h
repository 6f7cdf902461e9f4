// What a matrix product does to its sums before it stores them: the activations, each a functor on one vector of sums.
//
// Comes in: a vector of float32 (of float64 for kNone and kRelu) that is a sum of products plus the bias. Goes out: the same with
// the activation applied. Every gemm (FMA, VDPBF16PS, AMX, BFMMLA) takes its functor from with_activation.
//
// The functions that networks are made of are evaluated as a whole, because a pass for each operation of their definition costs
// more than half as much as the product before them: silu and both forms of gelu are x times a sigmoid of some kind, which one
// exponential of a negative number and one quotient give without cancellation. At most 4 ulp, as the functions of vector_math.h;
// gelu and silu of a negative number also have the error of their exponent's rounding, as the expression that users write has.
//
// Functors with kCoarse are for results that are rounded to bfloat16 (vector_math.h).
#pragma once

#include "rounding.h"
#include "vector_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

// Sums that are rounded before their bias is added, and again (GemmArgs::rounds), `width` apart. `bias`: whole vectors, or nullptr.
template <class Round>
KITSUNE_INLINE void round_rows_to(int64_t rows, int64_t width, int64_t columns, const float* bias, float* sums) {
  for (int64_t i = 0; i < rows; ++i, sums += width) {
    for (int64_t j = 0; j < columns; j += kFloats) {
      VF v = Round::apply(load_vector<VF>(sums + j));
      if (bias != nullptr) v = Round::apply(v + load_vector<VF>(bias + j));
      store_vector(sums + j, v);
    }
  }
}

__attribute__((noinline)) inline void round_rows(DType to, int64_t rows, int64_t width, int64_t columns, const float* bias,
                                                 float* sums) {
  to == DType::kBF16 ? round_rows_to<ToBFloat16>(rows, width, columns, bias, sums)
                     : round_rows_to<ToFloat16>(rows, width, columns, bias, sums);
}

struct NoActivation {
  template <class V>
  KITSUNE_INLINE V operator()(V v) const {
    return v;
  }
};

struct Relu {
  template <class V>
  KITSUNE_INLINE V operator()(V v) const {
    return v <= V{} ? V{} : v;  // NaN stays, -0 becomes 0
  }
};

// v where it is positive or 0 (or NaN), a v elsewhere.
struct LeakyRelu {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const { return choose(v < 0.0f, v * a, v); }
};

// v where it is positive (or NaN), a (e^v - 1) elsewhere.
template <bool kCoarse>
struct Elu {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const {
    VF minus_one = expm1_of_negative<kCoarse>(choose(v < 0.0f, v, VF{}));
    return choose(v <= 0.0f, copy_sign(minus_one, v) * a, v);
  }
};

template <bool kCoarse>
struct Logistic {
  KITSUNE_INLINE VF operator()(VF v) const { return logistic_as<kCoarse>(v); }
};

// v logistic(a v), a > 0. Where sums are rounded (GemmArgs::rounds), so is the logistic.
template <bool kCoarse>
struct Silu {
  float a;
  DType rounds;
  KITSUNE_INLINE VF operator()(VF v) const {
    if (rounds == DType::kBF16) return v * ToBFloat16::apply(logistic_as<kCoarse>(v * a));
    if (rounds == DType::kF16) return v * ToFloat16::apply(logistic_as<kCoarse>(v * a));
    VF e = exp_of_negative<kCoarse>(minus_abs(v * a));
    return divide<kCoarse>(choose(v < 0.0f, v * e, v), 1.0f + e);
  }
};

// v (1 + tanh(z / 2)) / 2 = v logistic(z) for z = v (a + b v^2), a > 0, b > 0.
template <bool kCoarse>
struct GeluTanh {
  float a, b;
  KITSUNE_INLINE VF operator()(VF v) const {
    VF e = exp_of_negative<kCoarse>(minus_abs(v * (v * v * b + a)));
    return divide<kCoarse>(choose(v < 0.0f, v * e, v), 1.0f + e);
  }
};

// v erfc(-a v) / 2, a > 0.
template <bool kCoarse>
struct GeluErf {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const {
    // e^(t^2) erfc(t) / 2 = (1 - p H(p)) / 2 with p = t / (t + 2.5): minimax over 0 <= t <= 10.2 (relative error 1e-8 (1 + t^2)),
    // by Lawson's iteration in float64. Beyond, erfc(t) is 0 in float32. Coarse: relative error 2e-5 (1 + t^2).
    static const float coarse[] = {1.4109973907f, -1.7246192694f, 1.1005024910f, -2.6460283995e-1f, -2.5127403438e-2f};
    static const float c[] = {1.4104735851f,     -1.7145202160f,    1.0374736786f,    -1.0022823513e-1f,
                              -1.9008031487e-1f, -1.1725062182e-2f, 1.0894124210e-1f, -4.0394101292e-2f};
    VF t = abs_vector(v * a);
    t = choose(t < 10.2f, t, splat<VF>(10.2f));
    VF p = divide<kCoarse>(t, t + 2.5f);
    VF half = exp_of_negative<kCoarse>(-(t * t)) * (0.5f - p * (kCoarse ? polynomial(p, coarse) : polynomial(p, c)));
    return v * choose(v < 0.0f, half, 1.0f - half);
  }
};

template <bool kCoarse>
struct Tanh {
  KITSUNE_INLINE VF operator()(VF v) const { return tanh_as<kCoarse>(v); }
};

// Calls f with the functor of `kind`, whose parameters are a and b (GemmArgs::act_a, act_b), of sums that are rounded to `rounds`;
// coarse where the results are bfloat16.
template <bool kCoarse = false, class F>
KITSUNE_INLINE void with_activation(Activation kind, float a, float b, DType rounds, F&& f) {
  switch (kind) {
    case Activation::kNone: return f(NoActivation{});
    case Activation::kRelu: return f(Relu{});
    case Activation::kLeakyRelu: return f(LeakyRelu{a});
    case Activation::kElu: return f(Elu<kCoarse>{a});
    case Activation::kLogistic: return f(Logistic<kCoarse>{});
    case Activation::kTanh: return f(Tanh<kCoarse>{});
    case Activation::kSilu: return f(Silu<kCoarse>{a, rounds});
    case Activation::kGeluTanh: return f(GeluTanh<kCoarse>{a, b});
    case Activation::kGeluErf: return f(GeluErf<kCoarse>{a});
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
