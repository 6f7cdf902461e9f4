// Planning of Vector programs that run strip by strip: their operations as a graph, tables in the place of some, the order of the
// others, which values stay in registers, and which lie in a buffer. Everything here happens once per compiled executable.

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "executor_internal.h"
#include "executor_memory.h"
#include "kitsune_cpu/strips.h"
#include "reciprocal.h"
#include "run_vector.h"

namespace kitsune::cpu {

namespace {

// The operations of a Vector program as a graph: what is computed of what, where strips have code for all of it.
struct StripNode {
  enum Kind : int8_t {
    kLoad,
    kConst,
    kIndex,
    kBytes,
    kNarrow,
    kPick,
    kCompute,
    kConvert,
    kTabled
  } kind = kCompute;  // kBytes: a load of bools; kNarrow: of 16-bit numbers that lie side by side
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

// Functions of one 16-bit number as tables: whatever a Vector program makes of such a number, there are 65 536 results of it.

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

// Puts tables in the place of operations that take longer: all that lies between a node whose numbers have 16 bits and a node that
// is computed of it and constants alone. A table holds the bits that the operations give where denormals are flushed, as in XLA's
// threads. `elements`: of the Vector in a call. Leaves `reached` and the counts of uses as they were.
void use_tables(StripNodes& nodes, const Vector& x, const Compile& c, int64_t elements) {
  if (elements >= kLeastElements) Tables(nodes, x, c).use();
}

bool lane_type(DType t) { return t == DType::kF32 || t == DType::kI32 || t == DType::kU32 || t == DType::kBool; }

using Node = StripNode;

class Builder {
 public:
  // `summed`: for each store, whether it is one of a SummedStore.
  Builder(const Vector& x, const Compile& c, const std::vector<bool>& summed)
      : x_(x), c_(c), summed_(summed), kernels_(*c.table.strips) {}

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
        for (auto [store, v] : stored_) rereads_ = rereads_ || writes_over(leaf.operand, store);
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
      // Strips have no code for these: x > y is y < x.
      case Opcode::op_gt: return compute(Opcode::op_lt, m.type, {defined[m.b], defined[m.a]}, &m);
      case Opcode::op_ge: return compute(Opcode::op_le, m.type, {defined[m.b], defined[m.a]}, &m);
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
        if (writes_over(a, b) && !in_place(x_, a, b)) return false;
      }
    return !rereads_;
  }

  bool writes_over(int load, int store) const { return !summed_[static_cast<size_t>(store)] && may_overlap(x_, load, store, c_); }

  const Vector& x_;
  const Compile& c_;
  const std::vector<bool>& summed_;
  const StripKernels& kernels_;
  std::vector<Node> nodes_;
  std::vector<bool> reached_;
  std::vector<std::pair<int, int>> stored_;
  bool rereads_ = false;  // something is loaded after it was stored
};

// Nothing where an operation has no code, or where a load and a store share memory without being the same elements.
std::optional<StripNodes> strip_nodes(const Vector& x, const Compile& c, const std::vector<bool>& summed) {
  return Builder(x, c, summed).nodes();
}

// Operations that save as much as it takes to copy an operand strip by strip, where blocks are converted and copied as a whole.
constexpr int kCopy = 4;
// Operations that a sum in registers saves: a store, and a pass over memory that converts what is folded.
constexpr int kSummed = 4;

using Node = StripNode;

class Planner {
 public:
  Planner(const Vector& x, const Compile& c, bool whole, StripNodes nodes, const std::vector<SummedStore>& summed)
      : x_(x),
        c_(c),
        whole_(whole),
        summed_(summed),
        kernels_(*c.table.strips),
        nodes_(std::move(nodes.all)),
        reached_(std::move(nodes.reached)),
        stored_(std::move(nodes.stored)) {}

  std::optional<StripPlan> plan() {
    if (!loops()) return std::nullopt;
    plan_.kernels = &kernels_;
    for (const SummedStore& s : summed_)
      if (!sums(s)) return std::nullopt;
    order();
    // What is called reads and writes memory: beside that, a strip saves something only where two others hand on what they hold.
    if (called() > 0 && computed_ - called() < 2) return std::nullopt;
    const int saved = computed_ + numbers() + narrow() + kSummed * static_cast<int>(summed_.size());
    if (saved < 2 + kCopy * copied() || !delay_stores()) return std::nullopt;
    find_slots();
    emit();
    return std::move(plan_);
  }

 private:
  const SummedStore* summed(size_t store) const {
    for (const SummedStore& s : summed_)
      if (static_cast<size_t>(s.store) == store) return &s;
    return nullptr;
  }

  // Plans a sum. False: the innermost loop does not go over its accumulators a whole number of times, or the strips do not begin
  // with whole vectors, or too many accumulators of its own would be needed.
  bool sums(const SummedStore& s) {
    constexpr int64_t kMostLanes = 1024;
    const Dim& inner = plan_.nest.back();
    const int64_t strip = kernels_.strip, lanes = strip / kStripVectors, item = static_cast<int64_t>(sizeof(float));
    if (inner.stride[x_.loads.size() + static_cast<size_t>(s.store)] != item || inner.n % s.period != 0) return false;
    if (plan_.step % lanes != 0) return false;
    // Whole strips side by side, if these are few; a strip across the end of the accumulators takes longer.
    const bool direct = s.period % strip == 0 || (s.period % lanes == 0 && s.period >= 4 * strip);
    const int64_t least = std::lcm(s.period, lanes), most = std::lcm(s.period, strip);
    const int64_t own = least == lanes || most > kMostLanes ? least : most;  // or those of one vector
    if (!direct && own > kMostLanes) return false;
    const int64_t accumulators = direct ? s.period : own;
    StripSum sum{s.sums, s.period, accumulators, direct, plan_.step % accumulators, 0, 0};
    plan_.sums.push_back(std::move(sum));
    return true;
  }

  // Operands that are copied for each strip: converted, not dense, or shorter than a strip.
  int copied() const {
    const bool brief = plan_.nest.back().extent(std::min(c_.program.tile_rows, c_.program.batch_rows)) < kernels_.strip;
    auto copies = [&](const Operand& o, size_t at, DType type) {
      if (picked(at)) return o.ref.dtype != type;
      if (is_narrow(type, o, at) && (at < x_.loads.size() || plan_.step == kernels_.strip)) return brief;
      if (at >= x_.loads.size() && plan_.step < kernels_.strip) return true;
      return brief || o.ref.dtype != type || plan_.nest.back().stride[at] != static_cast<int64_t>(item_size(o.ref.dtype));
    };
    int found = 0;
    for (size_t v = 0; v < nodes_.size(); ++v)
      if (reached_[v] && nodes_[v].operand >= 0 && !number(nodes_[v].operand))
        found += copies(x_.loads[static_cast<size_t>(nodes_[v].operand)], static_cast<size_t>(nodes_[v].operand), nodes_[v].type);
    for (auto [store, v] : stored_)
      if (summed(static_cast<size_t>(store)) == nullptr)
        found += copies(x_.stores[static_cast<size_t>(store)], x_.loads.size() + static_cast<size_t>(store), nodes_[v].type);
    return found;
  }

  int called() const {
    return static_cast<int>(std::count_if(order_.begin(), order_.end(), [&](int v) { return !takes_held(v); }));
  }

  // Operands that are one number along the innermost loop, which blocks repeat in memory for every row.
  int numbers() const {
    int found = 0;
    for (size_t v = 0; v < nodes_.size(); ++v)
      found += reached_[v] && nodes_[v].operand >= 0 &&
               ((nodes_[v].kind == Node::kLoad && number(nodes_[v].operand)) || picked(static_cast<size_t>(nodes_[v].operand)));
    return found;
  }

  // Operands whose 16 bits are converted in registers, where blocks take a pass over memory for it.
  int narrow() const {
    int found = 0;
    for (size_t v = 0; v < nodes_.size(); ++v) found += reached_[v] && nodes_[v].kind == Node::kNarrow;
    for (auto [store, v] : stored_) {
      const auto at = static_cast<size_t>(store);
      found += is_narrow(nodes_[v].type, x_.stores[at], x_.loads.size() + at);
    }
    return found;
  }

  bool loops() {
    std::vector<std::vector<int64_t>> strides;
    std::vector<int64_t> items;
    for (const auto* list : {&x_.loads, &x_.stores})
      for (const Operand& o : *list) {
        strides.push_back(byte_strides(o));
        items.push_back(static_cast<int64_t>(item_size(o.ref.dtype)));
      }
    Nest nest = make_nest(x_.extents, strides);
    for (const Node& n : nodes_)
      if (n.kind == Node::kIndex && n.micro->a >= 0) nest[n.micro->a].tag = static_cast<int>(n.micro->a);
    const int64_t rows = std::min(c_.program.tile_rows, c_.program.batch_rows);
    if (whole_) fix_rows(nest, rows);
    simplify(nest);
    const bool joined = join_short(nest);
    if (whole_) {  // columns one after the other, each of all rows
      if (!joined) exchange_short(nest, rows);
      simplify(nest);
    }
    plan_.step = kernels_.strip;
    const bool apart = nest.size() >= 2 && nest.back().extent(rows) == kernels_.strip && lie_apart(nest, items, kernels_.strip);
    if (!joined && !apart && nest.size() >= 2 && nest.back().extent(rows) < 2 * kernels_.strip)
      if (auto found = short_rows(nest, items, x_.loads.size(), rows, kernels_.strip); found) {
        plan_.nest = std::move(found->nest);
        plan_.step = found->step, plan_.row = found->row;
        rows_ = std::move(found->operands);
        return true;
      }
    if (!joined && !whole_ && !apart) exchange_short(nest, rows);
    if (!apart && nest.size() >= 2 && nest.back().extent(rows) < 2 * kernels_.strip) return false;
    plan_.nest = std::move(nest);
    return true;
  }

  // Operands before their readers; what has one reader right before it, so that it stays in registers.
  void order() {
    for (size_t v = 0; v < nodes_.size(); ++v) {
      Node& a = nodes_[v];
      if (!reached_[v] || a.kind != Node::kCompute || a.op != Opcode::op_sin) continue;
      for (size_t w = 0; w < nodes_.size(); ++w) {
        Node& b = nodes_[w];
        if (!reached_[w] || b.kind != Node::kCompute || b.op != Opcode::op_cos || b.args[0] != a.args[0]) continue;
        if (b.operand_type != DType::kF32 || a.operand_type != DType::kF32 || b.partner >= 0) continue;
        a.partner = static_cast<int>(w), b.partner = static_cast<int>(v);
        break;
      }
    }
    for (size_t l = 0; l < nodes_.size(); ++l)
      if (reached_[l] && nodes_[l].kind == Node::kLoad) {
        const auto o = static_cast<size_t>(nodes_[l].operand);
        if (picked(o) && rows_[o].how == RowsOperand::kPicked)
          nodes_[l].kind = Node::kPick;
        else if (nodes_[l].type == DType::kBool && !number(nodes_[l].operand) && !picked(o))
          nodes_[l].kind = Node::kBytes;
        else if (is_narrow(nodes_[l].type, x_.loads[o], o))
          nodes_[l].kind = Node::kNarrow;
      }
    for (auto [store, v] : stored_) put(v);
    for (size_t k = 0; k < order_.size(); ++k) {
      const Node& node = nodes_[order_[k]];
      for (int a = 0; a < node.count; ++a) nodes_[node.args[a]].last_read = static_cast<int>(k);
    }
  }

  // A load that is an instruction.
  static bool is_load(const Node& node) { return node.kind == Node::kBytes || node.kind == Node::kNarrow; }

  // Are the elements of operand number `at` numbers of 16 bits, side by side along strips, and those of the register float32?
  bool is_narrow(DType type, const Operand& o, size_t at) const {
    const bool sixteen = o.ref.dtype == DType::kBF16 || o.ref.dtype == DType::kF16;
    return sixteen && type == DType::kF32 && !picked(at) && plan_.nest.back().stride[at] == 2;
  }

  bool leaf(int v) const {
    const auto kind = nodes_[v].kind;
    return kind == Node::kLoad || kind == Node::kConst || kind == Node::kIndex;
  }

  void put(int v) {
    Node& node = nodes_[v];
    if (node.place >= 0 || leaf(v)) return;
    int args[4];
    std::copy_n(node.args, 4, args);
    // What several read is written to a buffer anyway, so it may as well come first.
    std::stable_sort(args, args + node.count, [&](int a, int b) {
      const bool shared_a = nodes_[a].uses > 1, shared_b = nodes_[b].uses > 1;
      return shared_a != shared_b ? shared_a : nodes_[a].size > nodes_[b].size;
    });
    for (int k = 0; k < node.count; ++k) put(args[k]);
    nodes_[v].place = static_cast<int>(order_.size());
    if (nodes_[v].partner >= 0) nodes_[nodes_[v].partner].place = nodes_[v].place;
    order_.push_back(v);
    computed_ += nodes_[v].kind == Node::kTabled ? nodes_[v].worth : !is_load(nodes_[v]) && nodes_[v].kind != Node::kPick;
  }

  DType storage_of(const Node& load) const { return x_.loads[static_cast<size_t>(load.operand)].ref.dtype; }
  bool number(int load) const {
    return plan_.nest.back().stride[load] == 0 && (rows_.empty() || rows_[static_cast<size_t>(load)].how == RowsOperand::kNumber);
  }
  // A load of a window.
  bool picked(size_t operand) const {
    return !rows_.empty() && rows_[operand].how != RowsOperand::kDense && rows_[operand].how != RowsOperand::kNumber;
  }

  // A store waits until nobody reads any more what was there. False: what is stored as it was loaded may be overwritten before.
  bool delay_stores() {
    for (auto [store, v] : stored_) {
      int read = -1;
      for (size_t l = 0; l < nodes_.size(); ++l) {
        const Node& load = nodes_[l];
        if (!reached_[l] || load.operand < 0 || summed(static_cast<size_t>(store)) != nullptr) continue;
        if (!may_overlap(x_, load.operand, store, c_)) continue;
        if (load.kind == Node::kLoad && !load.stores.empty()) return false;
        read = std::max(read, is_load(load) ? load.place : load.last_read);
      }
      (leaf(v) || read > nodes_[v].place ? late_ : early_).emplace_back(store, v);
    }
    return true;
  }

  bool takes_held(int v) const { return code_of(v, nullptr) != nullptr; }

  // The instruction of node v, nullptr where it is a call. `from`: of its operands; nullptr: all in memory.
  StripFn code_of(int v, const From* from) const {
    const From memory[4] = {From::kMemory, From::kMemory, From::kMemory, From::kMemory};
    const Node& node = nodes_[v];
    if (node.kind == Node::kBytes) return kernels_.special(StripKind::kLoadBool);
    if (node.kind == Node::kNarrow)
      return kernels_.special(storage_of(node) == DType::kBF16 ? StripKind::kLoadBFloat16 : StripKind::kLoadFloat16);
    if (node.kind == Node::kPick) return kernels_.special(StripKind::kPick);
    if (node.kind == Node::kTabled) return kernels_.tabled(node.narrow, from != nullptr ? from[0] : From::kMemory);
    if (node.partner >= 0) return nullptr;
    const From* f = from != nullptr ? from : memory;
    if (node.kind == Node::kConvert) return kernels_.convert(node.type, node.operand_type, f[0]);
    return kernels_.of(node.op, node.operand_type, f);
  }

  // Whether the only reader of v is the next instruction, and takes it from registers.
  bool stays(int v) const {
    const Node& node = nodes_[v];
    const int next = node.place + 1;
    if (!takes_held(v) || node.last_read > next) return false;
    for (auto [store, w] : late_)
      if (w == v) return false;
    return node.last_read < 0 || (node.last_read == next && takes_held(order_[static_cast<size_t>(next)]));
  }

  int32_t constant(DType type, const std::vector<double>& imm) {
    plan_.constants.emplace_back(static_cast<size_t>(kernels_.strip) * 4, "constants");
    void* to = plan_.constants.back().data();
    if (type == DType::kBool)
      std::fill_n(static_cast<uint32_t*>(to), kernels_.strip, imm[0] != 0 ? ~uint32_t{0} : 0);
    else
      fill_constant(type, to, kernels_.strip, imm);
    return static_cast<int32_t>(plan_.constants.size()) - 1;
  }

  void find_slots() {
    for (size_t v = 0; v < nodes_.size(); ++v)
      if (reached_[v] && nodes_[v].kind == Node::kPick) {
        plan_.constants.push_back(pick_table(rows_[static_cast<size_t>(nodes_[v].operand)], kernels_.strip));
        nodes_[v].table = static_cast<int32_t>(plan_.constants.size()) - 1;
      }
    for (size_t v = 0; v < nodes_.size(); ++v)
      if (reached_[v] && nodes_[v].kind == Node::kConst) nodes_[v].slot = constant(nodes_[v].type, nodes_[v].micro->imm);
    const auto first = static_cast<int32_t>(plan_.constants.size());
    for (size_t v = 0; v < nodes_.size(); ++v)
      if (reached_[v] && nodes_[v].kind == Node::kIndex) {
        Node& n = nodes_[v];
        n.slot = first + plan_.buffers++;
        int dim = -1;
        for (size_t d = 0; d < plan_.nest.size(); ++d)
          if (n.micro->a >= 0 && plan_.nest[d].tag == n.micro->a) dim = static_cast<int>(d);
        plan_.indices.push_back({n.type, n.slot, dim, n.micro->a, n.micro->b, n.micro->c});
      }
    std::vector<int32_t> free;
    std::vector<std::vector<int32_t>> ends(order_.size() + 1);
    auto give = [&](int v) {
      Node& n = nodes_[v];
      bool late = false;
      for (auto [store, w] : late_) late = late || w == v;
      if (free.empty()) free.push_back(first + plan_.buffers++);
      n.slot = free.back();
      free.pop_back();
      if (!late) ends[static_cast<size_t>(std::max(n.last_read, n.place))].push_back(n.slot);
    };
    for (size_t k = 0; k < order_.size(); ++k) {
      const int v = order_[k];
      if (!stays(v)) give(v);
      if (nodes_[v].partner >= 0) give(nodes_[v].partner);
      free.insert(free.end(), ends[k].begin(), ends[k].end());
    }
    for (StripSum& sum : plan_.sums) sum.place = first + plan_.buffers++;
    operands(first + plan_.buffers);
    for (size_t k = 0; k < plan_.sums.size(); ++k) plan_.sums[k].slot = plan_.stores[static_cast<size_t>(summed_[k].store)].slot;
  }

  void operands(int32_t slot) {
    auto make = [&](const Operand& o, size_t number, DType type) {
      StripOperand s{Address(o.ref, o.row_stride)};
      s.item = static_cast<int64_t>(item_size(type)), s.type = type, s.slot = slot++;
      s.direct = plan_.nest.back().stride[number] == s.item;
      return s;
    };
    for (const Operand& o : x_.loads) {
      plan_.loads.push_back(make(o, plan_.loads.size(), o.ref.dtype));
      plan_.loads.back().streams = c_.streams(o);
    }
    for (const Operand& o : x_.stores) plan_.stores.push_back(make(o, x_.loads.size() + plan_.stores.size(), o.ref.dtype));
    for (size_t v = 0; v < nodes_.size(); ++v) {
      Node& node = nodes_[v];
      if (!reached_[v] || node.operand < 0) continue;
      StripOperand& s = plan_.loads[static_cast<size_t>(node.operand)];
      s.used = true, s.number = number(node.operand), s.spread = node.type == DType::kBool, s.type = node.type,
      s.direct = s.direct && node.type == storage_of(node);
      if (!rows_.empty()) s.rows = rows_[static_cast<size_t>(node.operand)];
      if (node.kind == Node::kPick) s.direct = node.type == storage_of(node) && node.type != DType::kBool;
      if (node.kind == Node::kNarrow) s.type = DType::kU16, s.direct = true;
      const DType read = node.kind == Node::kNarrow ? DType::kU16 : storage_of(node);
      s.load = Loader(c_.table, s.type, read, c_.where);
      if (node.kind == Node::kLoad) node.slot = s.slot;
    }
    for (auto [store, v] : stored_) {
      if (summed(static_cast<size_t>(store)) != nullptr) continue;
      StripOperand& s = plan_.stores[static_cast<size_t>(store)];
      const DType storage = x_.stores[static_cast<size_t>(store)].ref.dtype;
      const bool narrow =
          is_narrow(nodes_[v].type, x_.stores[static_cast<size_t>(store)], x_.loads.size() + static_cast<size_t>(store));
      s.used = true, s.type = narrow ? DType::kU16 : nodes_[v].type;
      s.direct = s.direct && (narrow || s.type == storage) && plan_.step == kernels_.strip;
      s.store = Storer(c_.table, narrow ? DType::kU16 : storage, s.type, c_.where);
    }
  }

  StripInstruction& append(StripFn fn) {
    plan_.code.push_back({fn, {0, 0, 0, 0}, 0, 0, nullptr, {0, 0}, nullptr});
    return plan_.code.back();
  }
  void append_store(StripKind kind, int32_t to) { append(kernels_.special(kind)).to = to; }
  // What the program stores: `operand` of its stores <- v.
  void append_result(int v, int operand) {
    for (const StripSum& sum : plan_.sums)
      if (sum.slot == plan_.stores[static_cast<size_t>(operand)].slot) {
        append_store(StripKind::kSum, sum.slot);
        plan_.code.back().to2 = sum.place;
        return;
      }
    const StripOperand& to = plan_.stores[static_cast<size_t>(operand)];
    StripKind kind = nodes_[v].type == DType::kBool ? StripKind::kStoreBool : StripKind::kStore;
    if (to.type == DType::kU16) {
      const bool exact = nodes_[v].kind == Node::kCompute && nodes_[v].op == Opcode::op_to_bfloat16;
      const bool brain = x_.stores[static_cast<size_t>(operand)].ref.dtype == DType::kBF16;
      kind = !brain ? StripKind::kStoreFloat16 : exact ? StripKind::kStoreExactBFloat16 : StripKind::kStoreBFloat16;
    }
    append_store(kind, to.slot);
  }
  void append_load(int v) {
    append(kernels_.special(StripKind::kLoad)).operands[0] = nodes_[v].slot;
    spread(v);
  }
  // A number that somebody reads as a whole strip.
  void spread(int v) {
    if (nodes_[v].kind == Node::kLoad && number(nodes_[v].operand))
      plan_.loads[static_cast<size_t>(nodes_[v].operand)].spread = true;
  }

  void emit() {
    int held = -1;
    for (int v : order_) {
      held = emit(v, held);
      for (int w : {v, nodes_[v].partner})
        for (auto [store, of] : early_) {
          if (of != w) continue;
          if (held != w) append_load(held = w);
          append_result(w, store);
        }
    }
    for (auto [store, v] : late_) {
      append_load(v);
      append_result(v, store);
    }
    append(kernels_.special(StripKind::kEnd));
  }

  // Returns what is held afterwards.
  int emit(int v, int held) {
    const Node& node = nodes_[v];
    From from[4] = {From::kMemory, From::kMemory, From::kMemory, From::kMemory};
    for (int k = 0; k < node.count; ++k) {
      const Node& a = nodes_[node.args[k]];
      const bool one = a.kind == Node::kConst || (a.kind == Node::kLoad && number(a.operand));
      from[k] = node.args[k] == held ? From::kHeld : one ? From::kNumber : From::kMemory;
    }
    StripFn fn = code_of(v, from);
    if (fn == nullptr) {
      StripInstruction& i = append(kernels_.special(node.partner >= 0 ? StripKind::kSinCos : StripKind::kCall));
      for (int k = 0; k < node.count; ++k) i.operands[k] = nodes_[node.args[k]].slot;
      i.to = node.slot;
      if (node.partner >= 0) {
        const bool sine = node.op == Opcode::op_sin;
        spread(node.args[0]);
        i.to = sine ? node.slot : nodes_[node.partner].slot;
        i.to2 = sine ? nodes_[node.partner].slot : node.slot;
      } else if (node.kind == Node::kConvert) {
        spread(node.args[0]);
        i.call = c_.table.convert(node.type, node.operand_type);
      } else {
        unsigned numbers = 0;
        for (int k = 0; k < node.count; ++k) numbers |= unsigned{from[k] == From::kNumber} << k;
        if (numbers != 0) i.call = c_.table.vector_with(node.op, node.operand_type, numbers);
        if (i.call == nullptr) {
          i.call = c_.table.vector(node.op, node.operand_type);
          for (int k = 0; k < node.count; ++k) spread(node.args[k]);
        }
        for (size_t k = 0; k < node.micro->imm.size() && k < 2; ++k) i.imm[k] = node.micro->imm[k];
      }
      return -1;
    }
    StripInstruction& i = append(fn);
    if (node.kind == Node::kPick) {
      i.operands[0] = plan_.loads[static_cast<size_t>(node.operand)].slot, i.operands[1] = node.table;
      const PickTable read(plan_.constants[static_cast<size_t>(node.table)].data(), kernels_.strip);
      if (std::all_of(read.read, read.read + kStripVectors, [](int32_t bits) { return bits == 1; }))
        i.fn = kernels_.special(StripKind::kPickOne);
    }
    if (node.kind == Node::kTabled) {
      i.table = node.results.get();
      plan_.tables.push_back(node.results);
    }
    for (int k = 0; k < node.count; ++k) i.operands[k] = nodes_[node.args[k]].slot;
    divide_by_factors(i, node, from[0]);
    if (is_load(node)) i.operands[0] = plan_.loads[static_cast<size_t>(node.operand)].slot;
    if (node.slot >= 0) append_store(StripKind::kStore, node.slot);
    return v;
  }

  // A division by a constant becomes one of the constant's factors, where it has them.
  void divide_by_factors(StripInstruction& i, const Node& node, From from) const {
    if (node.kind != Node::kCompute || node.op != Opcode::op_div || node.operand_type != DType::kF32) return;
    const Node& by = nodes_[node.args[1]];
    const StripFn fn = by.kind == Node::kConst ? kernels_.divide_by_constant(from) : nullptr;
    if (fn == nullptr) return;
    if (const auto factors = reciprocal_of(static_cast<float>(by.micro->imm[0])))
      i.fn = fn, i.imm[0] = static_cast<double>(factors->high), i.imm[1] = static_cast<double>(factors->low);
  }

  const Vector& x_;
  const Compile& c_;
  const bool whole_;
  const std::vector<SummedStore>& summed_;
  const StripKernels& kernels_;
  StripPlan plan_;
  std::vector<Node> nodes_;
  std::vector<bool> reached_;
  std::vector<std::pair<int, int>> stored_, early_, late_;  // (store, node)
  std::vector<int> order_;
  std::vector<RowsOperand> rows_;  // of loads and stores, in strips of short rows
  int computed_ = 0;
};

}  // namespace

std::optional<StripPlan> plan_strips(const Vector& x, const Compile& c, bool whole, const std::vector<SummedStore>& summed) {
  if (c.table.strips == nullptr) return std::nullopt;
  std::vector<bool> sums(x.stores.size(), false);
  for (const SummedStore& s : summed) sums[static_cast<size_t>(s.store)] = true;
  std::optional<StripNodes> nodes = strip_nodes(x, c, sums);
  return nodes ? Planner(x, c, whole, std::move(*nodes), summed).plan() : std::nullopt;
}

}  // namespace kitsune::cpu
