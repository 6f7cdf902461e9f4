// Planning of Vector programs that run strip by strip: the order of the operations, which values stay in registers, and which lie
// in a buffer. Everything here happens once per compiled executable.
#include <algorithm>

#include "reciprocal.h"
#include "run_strips.h"
#include "run_vector.h"
#include "strip_nodes.h"

namespace kitsune::cpu {
namespace {

// Operations that save as much as it takes to copy an operand strip by strip, where blocks are converted and copied as a whole.
constexpr int kCopy = 4;

using Node = StripNode;

class Planner {
 public:
  Planner(const Vector& x, const Compile& c, bool whole, StripNodes nodes)
      : x_(x),
        c_(c),
        whole_(whole),
        kernels_(*c.table.strips),
        nodes_(std::move(nodes.all)),
        reached_(std::move(nodes.reached)),
        stored_(std::move(nodes.stored)) {}

  std::optional<StripPlan> plan() {
    if (!loops()) return std::nullopt;
    plan_.kernels = &kernels_;
    order();
    // What is called reads and writes memory: beside that, a strip saves something only where two others hand on what they hold.
    if (called() > 0 && computed_ - called() < 2) return std::nullopt;
    if (computed_ + numbers() < 2 + kCopy * copied() || !delay_stores()) return std::nullopt;
    find_slots();
    emit();
    return std::move(plan_);
  }

 private:
  // Operands that are copied for each strip: converted, not dense, or shorter than a strip.
  int copied() const {
    const bool brief = plan_.nest.back().extent(std::min(c_.program.tile_rows, c_.program.batch_rows)) < kernels_.strip;
    auto copies = [&](const Operand& o, size_t at, DType type) {
      if (picked(at)) return o.ref.dtype != type;
      if (at >= x_.loads.size() && plan_.step < kernels_.strip) return true;
      return brief || o.ref.dtype != type || plan_.nest.back().stride[at] != static_cast<int64_t>(item_size(o.ref.dtype));
    };
    int found = 0;
    for (size_t v = 0; v < nodes_.size(); ++v)
      if (reached_[v] && nodes_[v].operand >= 0 && !number(nodes_[v].operand))
        found += copies(x_.loads[static_cast<size_t>(nodes_[v].operand)], static_cast<size_t>(nodes_[v].operand), nodes_[v].type);
    for (auto [store, v] : stored_)
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
      }
    for (auto [store, v] : stored_) put(v);
    for (size_t k = 0; k < order_.size(); ++k) {
      const Node& node = nodes_[order_[k]];
      for (int a = 0; a < node.count; ++a) nodes_[node.args[a]].last_read = static_cast<int>(k);
    }
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
    computed_ +=
        nodes_[v].kind == Node::kTabled ? nodes_[v].worth : nodes_[v].kind != Node::kBytes && nodes_[v].kind != Node::kPick;
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
        if (!reached_[l] || load.operand < 0 || !may_overlap(x_, load.operand, store, c_)) continue;
        if (load.kind == Node::kLoad && !load.stores.empty()) return false;
        read = std::max(read, load.kind == Node::kBytes ? load.place : load.last_read);
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
    operands(first + plan_.buffers);
  }

  void operands(int32_t slot) {
    auto make = [&](const Operand& o, size_t number, DType type) {
      StripOperand s{Address(o.ref, o.row_stride)};
      s.item = static_cast<int64_t>(item_size(type)), s.type = type, s.slot = slot++;
      s.direct = plan_.nest.back().stride[number] == s.item;
      return s;
    };
    for (const Operand& o : x_.loads) plan_.loads.push_back(make(o, plan_.loads.size(), o.ref.dtype));
    for (const Operand& o : x_.stores) plan_.stores.push_back(make(o, x_.loads.size() + plan_.stores.size(), o.ref.dtype));
    for (size_t v = 0; v < nodes_.size(); ++v) {
      Node& node = nodes_[v];
      if (!reached_[v] || node.operand < 0) continue;
      StripOperand& s = plan_.loads[static_cast<size_t>(node.operand)];
      s.used = true, s.number = number(node.operand), s.spread = node.type == DType::kBool, s.type = node.type,
      s.direct = s.direct && node.type == storage_of(node);
      if (!rows_.empty()) s.rows = rows_[static_cast<size_t>(node.operand)];
      if (node.kind == Node::kPick) s.direct = node.type == storage_of(node) && node.type != DType::kBool;
      s.load = Loader(c_.table, node.type, storage_of(node), c_.where);
      if (node.kind == Node::kLoad) node.slot = s.slot;
    }
    for (auto [store, v] : stored_) {
      StripOperand& s = plan_.stores[static_cast<size_t>(store)];
      const DType storage = x_.stores[static_cast<size_t>(store)].ref.dtype;
      s.used = true, s.type = nodes_[v].type, s.direct = s.direct && s.type == storage && plan_.step == kernels_.strip;
      s.store = Storer(c_.table, storage, s.type, c_.where);
    }
  }

  StripInstruction& append(StripFn fn) {
    plan_.code.push_back({fn, {0, 0, 0, 0}, 0, 0, nullptr, {0, 0}, nullptr});
    return plan_.code.back();
  }
  void append_store(int v, int32_t to, bool bytes) {
    append(kernels_.special(bytes && nodes_[v].type == DType::kBool ? StripKind::kStoreBool : StripKind::kStore)).to = to;
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
          append_store(w, plan_.stores[static_cast<size_t>(store)].slot, true);
        }
    }
    for (auto [store, v] : late_) {
      append_load(v);
      append_store(v, plan_.stores[static_cast<size_t>(store)].slot, true);
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
    if (node.kind == Node::kBytes) i.operands[0] = plan_.loads[static_cast<size_t>(node.operand)].slot;
    if (node.slot >= 0) append_store(v, node.slot, false);
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

std::optional<StripPlan> plan_strips(const Vector& x, const Compile& c, bool whole) {
  if (c.table.strips == nullptr) return std::nullopt;
  std::optional<StripNodes> nodes = strip_nodes(x, c);
  return nodes ? Planner(x, c, whole, std::move(*nodes)).plan() : std::nullopt;
}

}  // namespace kitsune::cpu
