// What a matrix product does to its sums before it stores them: the activations, each a functor on one vector of sums.
//
// Comes in: a vector of float32 (of float64 for kNone and kRelu) that is a sum of products plus the bias. Goes out: the same with
// the activation applied. Every gemm (FMA, VDPBF16PS, AMX, BFMMLA) takes its functor from with_activation.
#pragma once

#include "simd.h"

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

// Calls f with the functor of `kind`; a and b are its parameters (GemmArgs::act_a, act_b).
template <class F>
KITSUNE_INLINE void with_activation(Activation kind, float, float, F&& f) {
  switch (kind) {
    case Activation::kRelu: return f(Relu{});
    case Activation::kNone: break;
  }
  f(NoActivation{});
}

}  // namespace kitsune::cpu::KITSUNE_ISA
