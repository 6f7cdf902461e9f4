// The operations of a Vector program as a graph, for run_strips.h: what is computed of what, where strips have code for all of it.
#pragma once

#include <memory>
#include <optional>

#include "executor_internal.h"
#include "kitsune_cpu/strips.h"

namespace kitsune::cpu {

struct StripNode {
  enum Kind : int8_t {
    kLoad,
    kConst,
    kIndex,
    kBytes,
    kPick,
    kCompute,
    kConvert,
    kTabled
  } kind = kCompute;  // kBytes: a load of bools
  Opcode op{};
  DType type{};          // of the result
  DType operand_type{};  // of operands, but for a select's predicate
  int args[4] = {-1, -1, -1, -1};
  int count = 0;
  int operand = -1;  // of a load
  const Micro* micro = nullptr;
  std::vector<int> stores;
  int uses = 0;        // as an operand of a node that is computed
  int size = 1;        // of the tree below it
  int partner = -1;    // of a sine its cosine, and the reverse
  int place = -1;      // in the order
  int last_read = -1;  // the last place that reads it
  int slot = -1;
  int table = -1;  // of a kPick, a load of some of a window's elements: the constant that says which
  // Of a kTabled: the results of all numbers of the type `narrow`, by their bits; the operations whose time it saves.
  std::shared_ptr<const float> results;
  DType narrow{};
  int worth = 0;
};

struct StripNodes {
  std::vector<StripNode> all;
  std::vector<bool> reached;                // by what is stored
  std::vector<std::pair<int, int>> stored;  // (store, node), in the program's order
};

// Nothing where an operation has no code, or where a load and a store share memory without being the same elements.
std::optional<StripNodes> strip_nodes(const Vector& x, const Compile& c);

}  // namespace kitsune::cpu
