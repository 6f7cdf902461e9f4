// The activations of a matmul by their definitions, in double.
#pragma once

#include <cmath>

#include "kitsune_cpu/kernels.h"

namespace kitsune::cpu::test {

// Parameters as networks have them: of leaky relu, elu, silu, both forms of gelu; a scale.
inline const float* usual_parameters(Activation kind) {
  static const float kUsual[kNumActivations][2] = {
      {}, {}, {0.01f}, {1.3f}, {}, {}, {1.0f}, {1.5957691669464111f, 0.07135481271f}, {0.7071067690849304f}, {-0.3f}};
  return kUsual[static_cast<int>(kind)];
}

template <class T>
double activated(Activation kind, const T* p, double x) {
  switch (kind) {
    case Activation::kNone: return x;
    case Activation::kRelu: return x <= 0 ? 0 : x;
    case Activation::kLeakyRelu: return x < 0 ? p[0] * x : x;
    case Activation::kElu: return x < 0 ? p[0] * std::expm1(x) : x;
    case Activation::kLogistic: return 1 / (1 + std::exp(-x));
    case Activation::kTanh: return std::tanh(x);
    case Activation::kSilu: return x / (1 + std::exp(-p[0] * x));
    case Activation::kGeluTanh: return x / (1 + std::exp(-x * (p[0] + p[1] * x * x)));
    case Activation::kScale: return p[0] * x;
    case Activation::kGeluErf: return x * std::erfc(-p[0] * x) / 2;
  }
  return x;
}

}  // namespace kitsune::cpu::test
