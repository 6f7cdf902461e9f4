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
// Where the sums are rounded to 16 bits, an activation has 65 536 operands, and its results come from a table (Tabled): on a Xeon
// with AMX a vector of them takes 2.3 ns, while the eight roundings of a gelu, each waiting for the one before, take 30.
//
// Functors with kCoarse are for results that are rounded to bfloat16 (vector_math.h).
#pragma once

#include "../activation_tables.h"
#include "rounding.h"
#include "vector_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

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

struct Scale {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const { return v * a; }
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

// v logistic(a v), a > 0.
template <bool kCoarse, class Round>
struct Silu {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const {
    if constexpr (kRounds<Round>) return v * Round::apply(logistic_as<kCoarse>(v * a));
    VF e = exp_of_negative<kCoarse>(minus_abs(v * a));
    return divide<kCoarse>(choose(v < 0.0f, v * e, v), 1.0f + e);
  }
};

// v (1 + tanh(z / 2)) / 2 = v logistic(z) for z = v (a + b v^2), a > 0, b > 0. Rounded: the steps of jax.nn.gelu, whose two
// constants have 16 bits, which b / a finds again.
template <bool kCoarse, class Round>
struct GeluTanh {
  float a, b;
  KITSUNE_INLINE VF operator()(VF v) const {
    if constexpr (kRounds<Round>) {
      VF cube = Round::apply(Round::apply(v * v) * v);
      VF sum = Round::apply(v + Round::apply(cube * Round::apply(splat<VF>(b / a))));
      VF t = Round::apply(tanh_as<kCoarse>(Round::apply(sum * (0.5f * a))));
      return v * (0.5f * Round::apply(1.0f + t));
    }
    VF e = exp_of_negative<kCoarse>(minus_abs(v * (v * v * b + a)));
    return divide<kCoarse>(choose(v < 0.0f, v * e, v), 1.0f + e);
  }
};

// v erfc(-a v) / 2, a > 0. Rounded: (v / 2) erfc(-(a v)), as jax.nn.gelu computes it. XLA widens the operand of erfc, and for that
// takes the digits of a bfloat16 before they are rounded.
template <bool kCoarse, class Round>
struct GeluErf {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const {
    // e^(t^2) erfc(t) / 2 = (1 - p H(p)) / 2 with p = t / (t + 2.5): minimax over 0 <= t <= 10.2 (relative error 1e-8 (1 + t^2)),
    // by Lawson's iteration in float64. Beyond, erfc(t) is 0 in float32. Coarse: relative error 2e-5 (1 + t^2).
    static const float coarse[] = {1.4109973907f, -1.7246192694f, 1.1005024910f, -2.6460283995e-1f, -2.5127403438e-2f};
    static const float c[] = {1.4104735851f,     -1.7145202160f,    1.0374736786f,    -1.0022823513e-1f,
                              -1.9008031487e-1f, -1.1725062182e-2f, 1.0894124210e-1f, -4.0394101292e-2f};
    VF t = abs_vector(kSame<Round, ToFloat16> ? Round::apply(v * a) : v * a);
    t = choose(t < 10.2f, t, splat<VF>(10.2f));
    VF p = divide<kCoarse>(t, t + 2.5f);
    VF half = exp_of_negative<kCoarse>(-(t * t)) * (0.5f - p * (kCoarse ? polynomial(p, coarse) : polynomial(p, c)));
    half = choose(v < 0.0f, half, 1.0f - half);
    return kRounds<Round> ? Round::apply(v * 0.5f) * Round::apply(2.0f * half) : v * half;
  }
};

template <bool kCoarse>
struct Tanh {
  KITSUNE_INLINE VF operator()(VF v) const { return tanh_as<kCoarse>(v); }
};

// Calls f with the functor of a `kind` that has a table where the sums are rounded to `Round`. `kCoarse`: for results in bfloat16.
template <bool kCoarse, class Round, class F>
KITSUNE_INLINE void with_function(Activation kind, float a, float b, F&& f) {
  switch (kind) {
    case Activation::kElu: return f(Elu<kCoarse>{a});
    case Activation::kLogistic: return f(Logistic<kCoarse>{});
    case Activation::kTanh: return f(Tanh<kCoarse>{});
    case Activation::kSilu: return f(Silu<kCoarse, Round>{a});
    case Activation::kGeluTanh: return f(GeluTanh<kCoarse, Round>{a, b});
    case Activation::kGeluErf: return f(GeluErf<kCoarse, Round>{a});
    default: return;
  }
}

// to[i] = the activation of from[i], which is rounded already, i < n: whole vectors. Denormals count as zeros, as in XLA's threads.
template <bool kCoarse, class Round>
void evaluate_as(const RoundedActivation& of, int64_t n, const float* from, float* to) {
  with_function<kCoarse, Round>(of.kind, of.a, of.b, [&](auto function) {
    for (int64_t i = 0; i < n; i += kFloats) {
      VF v = load_vector<VF>(from + i);
      store_vector(to + i, function(choose(abs_vector(v) < 0x1p-126f, copy_sign(VF{}, v), v)));
    }
  });
}

__attribute__((noinline)) inline void evaluate_rounded(const RoundedActivation& of, int64_t n, const float* from, float* to) {
  if (of.rounds == DType::kBF16)
    of.coarse ? evaluate_as<true, ToBFloat16>(of, n, from, to) : evaluate_as<false, ToBFloat16>(of, n, from, to);
  else
    of.coarse ? evaluate_as<true, ToFloat16>(of, n, from, to) : evaluate_as<false, ToFloat16>(of, n, from, to);
}

// The activation of sums, which it rounds first; without a table, of which there are a limited number, it computes it.
template <class Round>
struct Tabled {
  RoundedActivation of;
  const float* table;

  KITSUNE_INLINE VF operator()(VF v) const {
    if (table != nullptr) return look_up(table, Round::bits(v));
    alignas(64) float sums[kFloats];
    store_vector(sums, Round::apply(v));
    evaluate_rounded(of, kFloats, sums, sums);
    return load_vector<VF>(sums);
  }
};

// `activation` of rounded sums.
template <class Round, class A>
struct OfRounded {
  A activation;
  KITSUNE_INLINE VF operator()(VF v) const { return activation(Round::apply(v)); }
};

// Calls f with the functor of `kind`, whose parameters are a and b (GemmArgs::act_a, act_b). It rounds its operand to `Round`,
// unless it is NotRounded. `C`: what the results are stored as. Storing rounds as well, which is enough for kNone and kRelu.
template <class C, class Round, class F>
KITSUNE_INLINE void with_activation(Activation kind, float a, float b, F&& f) {
  constexpr bool kCoarse = kSame<C, BFloat16>;
  if constexpr (!kRounds<Round>) {
    switch (kind) {
      case Activation::kNone: return f(NoActivation{});
      case Activation::kRelu: return f(Relu{});
      case Activation::kLeakyRelu: return f(LeakyRelu{a});
      case Activation::kScale: return f(Scale{a});
      default: return with_function<kCoarse, Round>(kind, a, b, f);
    }
  } else {
    constexpr bool kStoreRounds = kSame<C, typename Round::Storage>;
    switch (kind) {
      case Activation::kNone:
        if constexpr (kStoreRounds) return f(NoActivation{});
        return f(OfRounded<Round, NoActivation>{});
      case Activation::kRelu:
        if constexpr (kStoreRounds) return f(Relu{});
        return f(OfRounded<Round, Relu>{});
      case Activation::kLeakyRelu: return f(OfRounded<Round, LeakyRelu>{{a}});
      case Activation::kScale: return f(OfRounded<Round, Scale>{{a}});
      default: break;
    }
    const RoundedActivation of{kind, a, b, Round::kType, kCoarse};
    return f(Tabled<Round>{of, activation_table(of, &evaluate_rounded)});
  }
}

// Calls f with a value of the type that `rounds` names: ToBFloat16, ToFloat16 or, of float32, NotRounded.
template <class F>
KITSUNE_INLINE void with_rounding(DType rounds, F&& f) {
  switch (rounds) {
    case DType::kBF16: return f(ToBFloat16{});
    case DType::kF16: return f(ToFloat16{});
    default: return f(NotRounded{});
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
