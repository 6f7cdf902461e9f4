// Vector programs as graphs of what strips have code for.
#include "strip_nodes.h"

#include <algorithm>

#include "run_vector.h"
#include "strip_tables.h"

namespace kitsune::cpu {
namespace {

bool lane_type(DType t) { return t == DType::kF32 || t == DType::kI32 || t == DType::kU32 || t == DType::kBool; }

using Node = StripNode;

class Builder {
 public:
  Builder(const Vector& x, const Compile& c) : x_(x), c_(c), kernels_(*c.table.strips) {}

  // A node for each operation.
  std::optional<StripNodes> nodes() {
    std::vector<int> defined(kMaxRegisters, -1);
    for (const Micro& m : x_.code) {
      if (m.op == Opcode::op_store) {
        nodes_[defined[m.b]].stores.push_back(static_cast<int>(m.a));
        stored_.emplace_back(static_cast<int>(m.a), defined[m.b]);
        continue;
      }
      defined[m.dst] = node(m, defined);
    }
    reached_.resize(nodes_.size());
    for (auto [store, v] : stored_)
      if (!reach(v)) return std::nullopt;
    if (!once() || !overlaps()) return std::nullopt;
    StripNodes found{std::move(nodes_), std::move(reached_), std::move(stored_)};
    use_tables(found, x_, c_, elements());
    nodes_ = std::move(found.all), stored_ = std::move(found.stored);
    count_again();
    return StripNodes{std::move(nodes_), std::move(reached_), std::move(stored_)};
  }

 private:
  int add(Node node) {
    nodes_.push_back(std::move(node));
    return static_cast<int>(nodes_.size()) - 1;
  }

  int compute(Opcode op, DType type, std::initializer_list<int> args, const Micro* m) {
    Node node;
    node.op = op, node.type = gives_bool(op) ? DType::kBool : type, node.operand_type = type, node.micro = m;
    for (int a : args) node.args[node.count++] = a;
    return add(node);
  }

  // Each load is of one type, and each store of one value.
  bool once() const {
    std::vector<int> loads(x_.loads.size(), 0), stores(x_.stores.size(), 0);
    for (size_t v = 0; v < nodes_.size(); ++v)
      if (reached_[v] && nodes_[v].kind == Node::kLoad && ++loads[static_cast<size_t>(nodes_[v].operand)] > 1) return false;
    for (auto [store, v] : stored_)
      if (++stores[static_cast<size_t>(store)] > 1) return false;
    return true;
  }

  int node(const Micro& m, const std::vector<int>& defined) {
    Node leaf;
    leaf.type = m.type, leaf.micro = &m;
    switch (m.op) {
      case Opcode::op_load:
        leaf.kind = Node::kLoad, leaf.operand = static_cast<int>(m.a);
        for (auto [store, v] : stored_) rereads_ = rereads_ || may_overlap(x_, leaf.operand, store, c_);
        return add(leaf);
      case Opcode::op_const: leaf.kind = Node::kConst; return add(leaf);
      case Opcode::op_index: leaf.kind = Node::kIndex; return add(leaf);
      case Opcode::op_convert: {
        const int a = defined[m.a];
        if (m.type == m.from_type) return a;
        if (nodes_[a].kind == Node::kIndex && item_size(nodes_[a].type) == 8 && m.type != DType::kBool) {  // counted so at once
          leaf.kind = Node::kIndex, leaf.micro = nodes_[a].micro;
          return add(leaf);
        }
        leaf.kind = Node::kConvert, leaf.operand_type = m.from_type;
        leaf.args[leaf.count++] = a;
        return add(leaf);
      }
      case Opcode::op_integer_pow: return power(m, defined[m.a]);
      case Opcode::op_bitcast: {
        const int v = compute(m.op, m.type, {defined[m.a]}, &m);
        nodes_[v].operand_type = m.from_type;
        return v;
      }
      default: {
        const int v = compute(m.op, m.type, {}, &m);
        const int64_t from[4] = {m.a, m.b, m.c, m.d};
        for (int k = 0; k < operands_of(m.op); ++k) nodes_[v].args[nodes_[v].count++] = defined[from[k]];
        return v;
      }
    }
  }

  // As map_integer_pow (kernels/vector_ops.h) multiplies.
  int power(const Micro& m, int x) {
    const auto y = static_cast<int64_t>(m.imm[0]);
    if (y != 2 && y != 3) return compute(m.op, m.type, {x}, &m);
    const int square = compute(Opcode::op_mul, m.type, {x, x}, &m);
    return y == 2 ? square : compute(Opcode::op_mul, m.type, {x, square}, &m);
  }

  // Of the Vector, in a call.
  int64_t elements() const {
    int64_t found = c_.program.batch_rows;
    for (int64_t extent : x_.extents) found *= extent;
    return found;
  }

  void count_again() {
    reached_.assign(nodes_.size(), false);
    for (Node& node : nodes_) node.uses = 0, node.size = 1;
    for (auto [store, v] : stored_) reach(v);
  }

  // Checks `v` and what it is computed of, and counts the uses.
  bool reach(int v) {
    Node& node = nodes_[v];
    if (reached_[v]) return true;
    reached_[v] = true;
    if (!lane_type(node.type)) return false;
    if (node.kind == Node::kCompute && !known(node)) return false;
    if (node.kind == Node::kConvert && !convertible(node)) return false;
    for (int k = 0; k < node.count; ++k) {
      if (!reach(node.args[k])) return false;
      ++nodes_[node.args[k]].uses;
      nodes_[v].size = std::min(1 << 20, nodes_[v].size + nodes_[node.args[k]].size);
    }
    return true;
  }

  bool known(const Node& node) const {
    const From memory[4] = {From::kMemory, From::kMemory, From::kMemory, From::kMemory};
    if (!lane_type(node.operand_type)) return false;
    if (kernels_.of(node.op, node.operand_type, memory) != nullptr) return true;
    const bool bools = node.type == DType::kBool || node.operand_type == DType::kBool;
    return !bools && node.op != Opcode::op_select && c_.table.vector(node.op, node.operand_type) != nullptr;
  }

  bool convertible(const Node& node) const {
    if (!lane_type(node.operand_type)) return false;
    if (kernels_.convert(node.type, node.operand_type, From::kMemory) != nullptr) return true;
    return node.type != DType::kBool && node.operand_type != DType::kBool &&
           c_.table.convert(node.type, node.operand_type) != nullptr;
  }

  // What is loaded and stored is the same elements, or has nothing in common.
  bool overlaps() const {
    for (size_t l = 0; l < x_.loads.size(); ++l)
      for (size_t s = 0; s < x_.stores.size(); ++s) {
        const int a = static_cast<int>(l), b = static_cast<int>(s);
        if (may_overlap(x_, a, b, c_) && !in_place(x_, a, b)) return false;
      }
    return !rereads_;
  }

  const Vector& x_;
  const Compile& c_;
  const StripKernels& kernels_;
  std::vector<Node> nodes_;
  std::vector<bool> reached_;
  std::vector<std::pair<int, int>> stored_;
  bool rereads_ = false;  // something is loaded after it was stored
};

}  // namespace

std::optional<StripNodes> strip_nodes(const Vector& x, const Compile& c) { return Builder(x, c).nodes(); }

}  // namespace kitsune::cpu
