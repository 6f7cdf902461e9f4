// Matrices copied with rows as columns: the elements of a row side by side in both.
#pragma once

#include "panel.h"

namespace kitsune::cpu::KITSUNE_ISA {

constexpr int64_t kSide = 16;  // of the squares that are transposed in registers

// kSide elements as words, and the reverse.
template <class T>
KITSUNE_INLINE void load_words(const char* from, uint32_t* to) {
  T elements[kSide];
  __builtin_memcpy(elements, from, sizeof elements);
  for (int64_t k = 0; k < kSide; ++k) to[k] = elements[k];
}

template <class T>
KITSUNE_INLINE void store_words(const uint32_t* from, char* to) {
  T elements[kSide];
  for (int64_t k = 0; k < kSide; ++k) elements[k] = T(from[k]);
  __builtin_memcpy(to, elements, sizeof elements);
}

// kSide rows of `from` at a time, along all of their elements: the pages of so many rows are at hand.
template <class T>
void transpose_rows(int64_t rows, int64_t columns, const void* from_, int64_t from_step, void* to_, int64_t to_step) {
  constexpr int64_t kItem = int64_t(sizeof(T));
  const char* from = static_cast<const char*>(from_);
  char* to = static_cast<char*>(to_);
  alignas(64) uint32_t lines[kSide * kSide], across[kSide * kSide];
  auto copy = [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    for (int64_t i = i0; i < i1; ++i)
      for (int64_t j = j0; j < j1; ++j) __builtin_memcpy(to + i * to_step + j * kItem, from + j * from_step + i * kItem, kItem);
  };
  const int64_t whole_rows = rows / kSide * kSide, whole_columns = columns / kSide * kSide;
  for (int64_t j = 0; j < whole_columns; j += kSide) {
    for (int64_t i = 0; i < whole_rows; i += kSide) {
      for (int64_t k = 0; k < kSide; ++k) load_words<T>(from + (j + k) * from_step + i * kItem, lines + k * kSide);
      transpose_words(lines, across);
      for (int64_t k = 0; k < kSide; ++k) store_words<T>(across + k * kSide, to + (i + k) * to_step + j * kItem);
    }
    copy(whole_rows, rows, j, j + kSide);
  }
  copy(0, rows, whole_columns, columns);
}

inline TransposeFn transpose_function(int64_t item) {
  return item == 2 ? &transpose_rows<uint16_t> : item == 4 ? &transpose_rows<uint32_t> : nullptr;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
