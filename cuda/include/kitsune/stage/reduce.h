// Reductions along the columns of a tile: a row's columns lie in the four threads of a quad.
#pragma once

#include "kitsune/layout.h"
#include "kitsune/math.h"

namespace kitsune {

struct Sum {
  template <class V>
  static KITSUNE_DEVICE V identity() {
    return V(0);
  }
  template <class V>
  static KITSUNE_DEVICE V fold(V a, V b) {
    return a + b;
  }
};
struct Prod {
  template <class V>
  static KITSUNE_DEVICE V identity() {
    return V(1);
  }
  template <class V>
  static KITSUNE_DEVICE V fold(V a, V b) {
    return a * b;
  }
};
struct Max {
  template <class V>
  static KITSUNE_DEVICE V identity() {
    return lowest<V>();
  }
  template <class V>
  static KITSUNE_DEVICE V fold(V a, V b) {
    return maximum(a, b);
  }
};
struct Min {
  template <class V>
  static KITSUNE_DEVICE V identity() {
    return highest<V>();
  }
  template <class V>
  static KITSUNE_DEVICE V fold(V a, V b) {
    return minimum(a, b);
  }
};
struct And {
  template <class V>
  static KITSUNE_DEVICE V identity() {
    return ones<V>();
  }
  template <class V>
  static KITSUNE_DEVICE V fold(V a, V b) {
    return V(a & b);
  }
};
struct Or {
  template <class V>
  static KITSUNE_DEVICE V identity() {
    return V(0);
  }
  template <class V>
  static KITSUNE_DEVICE V fold(V a, V b) {
    return V(a | b);
  }
};

KITSUNE_DEVICE float exchange(float v, u32 mask) { return shfl_xor(v, mask); }
KITSUNE_DEVICE u32 exchange(u32 v, u32 mask) { return shfl_xor(v, mask); }
KITSUNE_DEVICE i32 exchange(i32 v, u32 mask) { return static_cast<i32>(shfl_xor(static_cast<u32>(v), mask)); }
KITSUNE_DEVICE bool exchange(bool v, u32 mask) { return shfl_xor(static_cast<u32>(v), mask) != 0; }

// The fold of a value over lanes that differ in the bits [From, To) of their number, in a fixed order, in all of them.
template <class How, int From, int To, class V>
KITSUNE_DEVICE V fold_lanes(V v) {
  KITSUNE_UNROLL
  for (int mask = From; mask < To; mask *= 2) v = How::fold(v, exchange(v, mask));
  return v;
}

// A thread's partial results for its two rows to those of the whole rows, in every thread of the quad.
template <class How, class V>
KITSUNE_DEVICE void fold_quad(V (&row)[2]) {
  row[0] = fold_lanes<How, 1, 4>(row[0]);
  row[1] = fold_lanes<How, 1, 4>(row[1]);
}

}  // namespace kitsune
