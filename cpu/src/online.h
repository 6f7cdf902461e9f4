// Sums of rows that were scaled by e^-top, where a tile knows only the largest score of its own rows: the state of an online
// softmax. Each head's sum has a top of its own. Two sums are added up at the larger of their tops, to which each is scaled first.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace kitsune::cpu {

// What rows are scaled by: no infinity, and no NaN.
inline double scaled_by(float top) { return std::isfinite(top) ? static_cast<double>(top) : 0.0; }

// What a sum at `top` is multiplied by to be one at `to`. Rows whose scores are all -inf have added up to 0, or to a NaN.
inline double rescaling(float top, float to) {
  if (top == to || top == -std::numeric_limits<float>::infinity() || std::isnan(to)) return 1.0;
  return std::exp(scaled_by(top) - scaled_by(to));
}

// A NaN among the scores stays.
inline float higher(float a, float b) { return a > b || std::isnan(a) ? a : b; }

// into and its tops <- the sum of both.
inline void add_scaled(int64_t heads, int64_t inner, double* into, float* top, const double* from, const float* from_top) {
  for (int64_t h = 0; h < heads; ++h, into += inner, from += inner) {
    const float to = higher(top[h], from_top[h]);
    const double mine = rescaling(top[h], to), other = rescaling(from_top[h], to);
    for (int64_t j = 0; j < inner; ++j) into[j] = into[j] * mine + from[j] * other;
    top[h] = to;
  }
}

inline bool all_finite(int64_t n, const float* top) {
  bool finite = true;
  for (int64_t h = 0; h < n; ++h) finite &= std::isfinite(top[h]);
  return finite;
}

// A softmax of scores whose largest is an infinity or a NaN is NaN.
template <class T>
void spoil(int64_t heads, int64_t inner, T* sum, const float* top) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t j = 0; j < inner && !std::isfinite(top[h]); ++j) sum[h * inner + j] = std::numeric_limits<T>::quiet_NaN();
}

}  // namespace kitsune::cpu
