// Sums by sorted indices: the rows of one index are a run of the stream, so whoever meets the end of a run stores its sum, and no
// table of sums is kept beside each other.
//
// A strand stores the segments that begin and end inside of it straight to the result, and what lies between two of them is the
// identity. Its first segment may have begun in the strand before, and its last one may go on in the next: of these it keeps the
// sums, and of scaled ones what they are scaled by. In the end the kept sums of all strands, in their order, are added
// up.
#pragma once

#include <algorithm>
#include <cstring>

#include "executor_internal.h"

namespace kitsune::cpu {

// What a strand keeps: the numbers of its first and last segment (-1: it has met none), then their sums in SinkPlan::acc. The
// second sum is there if the segments are not the same one.
struct Segments {
  int64_t first, last;
  int64_t filled;  // up to which rows of the result are written: `last`, if the indices are as sorted as was promised
  int64_t stored;  // a segment whose sum is in the result; -1 if there is none
  static constexpr size_t kHeader = kAlign;
  static size_t sum_bytes(int64_t width, DType acc) { return align_up(times(static_cast<size_t>(width), item_size(acc))); }
  static size_t bytes(int64_t width, DType acc, int64_t heads) {
    return plus(kHeader, times(2, plus(sum_bytes(width, acc), top_bytes(heads))));
  }
  static size_t top_bytes(int64_t heads) { return align_up(times(static_cast<size_t>(heads), sizeof(float))); }
  char* sum(bool second, size_t bytes_of_one) { return reinterpret_cast<char*>(this) + kHeader + (second ? bytes_of_one : 0); }
  // What a scaled sum was scaled by, behind both sums.
  float* top(bool second, size_t bytes_of_one, int64_t heads) {
    return reinterpret_cast<float*>(sum(true, bytes_of_one) + bytes_of_one + (second ? top_bytes(heads) : 0));
  }
};

// Rows [begin, end) of a sink's result that no strand has stored: sums kept by strands, and the identity between them.
void finish_segments(const Plan& plan, int64_t sink, int64_t begin, int64_t end, char* strands, char* out);

// A sink's result is finished in pieces of so many bytes or more, `kSegmentJobs` of them at most. A piece takes 0.1 us whatever its
// size: 1000 rows of 4 bytes took 25 us in 250 pieces, 1.5 in one (Xeon with AMX). It also makes a row of the identity for itself.
constexpr int64_t kSegmentJobs = 256, kSegmentBytes = 128 * 1024;
inline int64_t segment_piece(int64_t rows, int64_t row_bytes) {
  return std::max((rows - 1) / kSegmentJobs + 1, kSegmentBytes / std::max<int64_t>(row_bytes, 1));
}

// `row`, of `bytes`, to `n` rows from `to` on: in pieces that double, because a copy of a few bytes takes 5 ns whatever they are.
inline void fill_rows(char* to, int64_t n, const char* row, size_t bytes) {
  if (n <= 0 || bytes == 0) return;
  std::memcpy(to, row, bytes);
  const size_t total = static_cast<size_t>(n) * bytes, most = std::max(bytes, 4096 / bytes * bytes);
  for (size_t done = bytes; done < total;) {
    const size_t more = std::min({done, most, total - done});
    std::memcpy(to + done, to, more);
    done += more;
  }
}

}  // namespace kitsune::cpu
