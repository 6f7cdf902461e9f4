#include "strip_tables.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "executor_memory.h"

namespace kitsune::cpu {
namespace {

using Node = StripNode;

constexpr int64_t kOperands = 65536;
// The time of a table's instruction, in arithmetic instructions: 2.3 ns a vector of 16, from a table in the second level of a Xeon
// with AMX, where a fused multiply-add takes 0.16.
constexpr int kTableCost = 14;
constexpr int kPass = 4;                   // the same of an operation's pass over memory
constexpr int64_t kLeastElements = 16384;  // below, lines of a table would be fetched for a few numbers each
constexpr size_t kMostTables = 4;          // of a Vector, different ones, 256 KB each

// About how many instructions an operation is.
int cost_of(const Node& node) {
  if (node.kind == Node::kConvert) return 1;
  switch (node.op) {
    case Opcode::op_to_float16: return 2;
    case Opcode::op_to_bfloat16: return 4;
    case Opcode::op_select:
    case Opcode::op_max:
    case Opcode::op_min: return 3;
    case Opcode::op_clamp: return 6;
    case Opcode::op_div:
    case Opcode::op_sqrt:
    case Opcode::op_rsqrt: return 8;
    case Opcode::op_exp:
    case Opcode::op_exp2: return 16;
    case Opcode::op_logistic:
    case Opcode::op_tanh:
    case Opcode::op_log: return 24;
    default: break;
  }
  if (node.op >= Opcode::op_exp && node.op < Opcode::op_integer_pow) return 40;
  return node.op == Opcode::op_pow || node.op == Opcode::op_rem || node.op == Opcode::op_atan2 ? 40 : 1;
}

// Denormals are zeros while this lives.
class FlushDenormals {
#if defined(__SSE__)
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

class Tables {
 public:
  Tables(StripNodes& nodes, const Vector& x, const Compile& c)
      : nodes_(nodes.all), reached_(nodes.reached), stored_(nodes.stored), x_(x), c_(c), source_(nodes.all.size(), kNone) {}

  void use() {
    for (size_t v = 0; v < nodes_.size(); ++v)  // operands come before their readers
      if (reached_[v]) source_[v] = source_of(static_cast<int>(v));
    std::vector<bool> leaves(nodes_.size(), false);  // read by what has another source, or stored
    for (auto [store, v] : stored_) leaves[v] = true;
    for (size_t v = 0; v < nodes_.size(); ++v)
      for (int k = 0; reached_[v] && k < nodes_[v].count; ++k)
        if (const int a = nodes_[v].args[k]; source_[v] != source_[a]) leaves[a] = true;
    std::set<const float*> used;
    for (size_t v = 0; v < nodes_.size() && used.size() <= kMostTables; ++v) {
      const int from = source_[v];
      if (!reached_[v] || !leaves[v] || from < 0 || from == static_cast<int>(v) || nodes_[v].type != DType::kF32) continue;
      const std::vector<int> inside = between(static_cast<int>(v), from);
      int cost = 0;
      for (int w : inside) cost += nodes_[w].kind == Node::kConst ? 0 : cost_of(nodes_[w]);
      if (cost <= kTableCost) continue;
      Node table;
      table.kind = Node::kTabled, table.type = table.operand_type = DType::kF32;
      table.args[table.count++] = from;
      table.narrow = narrow_[from], table.worth = static_cast<int>(inside.size()) + (cost - kTableCost) / kPass;
      table.results = table_of(inside, from);
      table.stores = nodes_[v].stores;
      used.insert(table.results.get());
      if (used.size() <= kMostTables) replaced_.emplace_back(static_cast<int>(v), std::move(table));
    }
    for (auto& [v, table] : replaced_) nodes_[v] = std::move(table);
  }

 private:
  static constexpr int kNone = -1, kConstant = -2;

  // The only node that `v` is computed of whose numbers have 16 bits; itself where it is such a node of several others.
  int source_of(int v) {
    const Node& node = nodes_[v];
    const DType narrow = bits_of(node);
    int found = kConstant;
    bool tabled = node.kind == Node::kConst || node.kind == Node::kCompute || node.kind == Node::kConvert;
    tabled = tabled && !(node.kind == Node::kCompute && node.op == Opcode::op_bitcast);
    for (int k = 0; tabled && k < node.count; ++k) {
      const int s = source_[node.args[k]];
      if (s == kConstant) continue;
      tabled = s != kNone && (found == kConstant || found == s);
      found = s;
    }
    if (tabled) return found;
    if (narrow == DType::kF32) return kNone;
    narrow_[v] = narrow;
    return v;
  }

  // The 16-bit type that holds all numbers of `node`, or float32.
  DType bits_of(const Node& node) const {
    DType type = DType::kF32;
    if (node.kind == Node::kLoad && node.type == DType::kF32) type = x_.loads[static_cast<size_t>(node.operand)].ref.dtype;
    if (node.kind == Node::kCompute && node.op == Opcode::op_to_bfloat16) type = DType::kBF16;
    if (node.kind == Node::kCompute && node.op == Opcode::op_to_float16) type = DType::kF16;
    return type == DType::kBF16 || type == DType::kF16 ? type : DType::kF32;
  }

  // The nodes that make `v` of `from`, in order.
  std::vector<int> between(int v, int from) const {
    std::vector<int> found{v};
    for (size_t k = 0; k < found.size(); ++k)
      for (int a = 0; a < nodes_[found[k]].count; ++a) {
        const int w = nodes_[found[k]].args[a];
        if (w != from && std::find(found.begin(), found.end(), w) == found.end()) found.push_back(w);
      }
    std::sort(found.begin(), found.end());
    return found;
  }

  // Everything that the results depend on.
  std::string key(const std::vector<int>& inside, int from) const {
    std::string text = std::string(c_.table.isa) + "/" + dtype_name(narrow_.at(from));
    for (int v : inside) {
      const Node& node = nodes_[v];
      text += ";" + std::to_string(int(node.kind)) + "," + std::to_string(int(node.op)) + "," + std::to_string(int(node.type)) +
              "," + std::to_string(int(node.operand_type));
      for (int k = 0; k < node.count; ++k) {
        const auto at = std::lower_bound(inside.begin(), inside.end(), node.args[k]);
        text += "," + (node.args[k] == from ? "x" : std::to_string(at - inside.begin()));
      }
      if (node.micro != nullptr)
        for (double imm : node.micro->imm) text += "," + std::to_string(bits(imm));
    }
    return text;
  }

  static uint64_t bits(double x) {
    uint64_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
  }

  // Equal tables are one, as long as a program has it.
  std::shared_ptr<const float> table_of(const std::vector<int>& inside, int from) const {
    static std::mutex mutex;
    static auto* known = new std::map<std::string, std::weak_ptr<const float>>;  // threads may outlive static objects
    const std::string name = key(inside, from);
    const std::lock_guard<std::mutex> lock(mutex);
    std::weak_ptr<const float>& entry = (*known)[name];
    if (std::shared_ptr<const float> alive = entry.lock()) return alive;
    std::shared_ptr<const float> made = computed(inside, from);
    entry = made;
    return made;
  }

  std::shared_ptr<const float> computed(const std::vector<int>& inside, int from) const {
    [[maybe_unused]] const FlushDenormals flush{};
    std::map<int, Block> values;
    auto array = [&](int v) -> Block& {
      return values.emplace(v, Block(static_cast<size_t>(kOperands) * sizeof(float), "tables of functions")).first->second;
    };
    std::vector<uint16_t> operands(static_cast<size_t>(kOperands));
    std::iota(operands.begin(), operands.end(), uint16_t{0});
    c_.table.load(DType::kF32, narrow_.at(from))(kOperands, array(from).data(), operands.data(), 1);
    for (int v : inside) {
      const Node& node = nodes_[v];
      void* to = array(v).data();
      if (node.kind == Node::kConst) {
        fill_constant(node.type, to, kOperands, node.micro->imm);
        continue;
      }
      const void* in[4] = {nullptr, nullptr, nullptr, nullptr};
      for (int k = 0; k < node.count; ++k) in[k] = values.at(node.args[k]).data();
      double imm[2] = {0, 0};
      for (size_t k = 0; node.kind == Node::kCompute && k < node.micro->imm.size() && k < 2; ++k) imm[k] = node.micro->imm[k];
      const VectorFn fn = node.kind == Node::kConvert ? c_.table.convert(node.type, node.operand_type)
                                                      : c_.table.vector(node.op, node.operand_type);
      fn(kOperands, to, in[0], in[1], in[2], in[3], imm);
    }
    auto owner = std::make_shared<Block>(std::move(values.at(inside.back())));
    return {owner, reinterpret_cast<const float*>(owner->data())};
  }

  std::vector<Node>& nodes_;
  const std::vector<bool>& reached_;
  const std::vector<std::pair<int, int>>& stored_;
  const Vector& x_;
  const Compile& c_;
  std::vector<int> source_;
  std::map<int, DType> narrow_;  // of nodes whose numbers have 16 bits
  std::vector<std::pair<int, Node>> replaced_;
};

}  // namespace

void use_tables(StripNodes& nodes, const Vector& x, const Compile& c, int64_t elements) {
  if (elements >= kLeastElements) Tables(nodes, x, c).use();
}

}  // namespace kitsune::cpu
