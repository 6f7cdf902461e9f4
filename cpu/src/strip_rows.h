// Short rows in strips: loops too short for a strip, joined with the loops around them, so that a strip is some whole rows.
//
// A tile of [rows, 16] times a number for each row is one loop of rows x 16 elements. Of an operand that is not dense in that loop,
// a strip reads a *window* of elements that lie one after the other, and picks what each of its own elements needs.
#pragma once

#include <optional>

#include "executor_memory.h"
#include "nest.h"

namespace kitsune::cpu {

struct RowsOperand {
  enum How : int8_t {
    kDense,     // the strip itself lies one element after the other
    kNumber,    // one number
    kRepeated,  // all strips pick the same elements of the same window
    kPicked,    // each strip has a window of its own
  } how = kDense;
  int64_t next = 0;             // bytes from a row's part of the window to the next row's
  std::vector<int64_t> window;  // elements, of a strip of so many rows
  std::vector<int32_t> picks;   // for each element of a strip: which one of the window
};

struct ShortRows {
  Nest nest;         // the innermost loop is the joined one, its strides those of dense operands, and 0 of others
  int64_t row = 0;   // elements of a row, of which strips have whole ones
  int64_t step = 0;  // elements of a strip
  std::vector<RowsOperand> operands;
};

// The innermost loops of `nest` as one, of operands (the first `loads` of them are read, the others written) whose elements have so
// many bytes. Nothing where an operand's elements lie too far apart, or what is written is not dense.
std::optional<ShortRows> short_rows(const Nest& nest, const std::vector<int64_t>& item_sizes, size_t loads, int64_t tile_rows,
                                    int64_t strip);

// Have the innermost loops of `nest` rows of `row` elements side by side, and others between them, of some operand? Rows of one
// strip are read where they lie then: joined, each would be copied, and picked element by element.
bool lie_apart(const Nest& nest, const std::vector<int64_t>& item_sizes, int64_t row);

// What a PickTable (strips.h) reads, of an operand that is picked.
Block pick_table(const RowsOperand& x, int64_t strip);

}  // namespace kitsune::cpu
