// The validator: every reference stays inside its memory, types agree, and the stages can always make progress.
//
// All address arithmetic is in 128 bits over operands bounded by kMaxCount, so it cannot overflow. Why a checked program cannot
// deadlock: a (stage, tile) waits for its producers at the same tile and, for a free slot, for its consumers at tile - depth. With
// a depth of at least 1 and an acyclic stage graph, both come earlier in the order (tile, topological position), so the least
// unfinished one can always run.
#include <algorithm>
#include <cmath>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu {
namespace {

__extension__ typedef __int128 Wide;

std::string str(int64_t v) { return std::to_string(v); }

[[noreturn]] void reject(const std::string& where, const std::string& what) { throw ProgramError(where + ": " + what); }

struct Checker {
  Program& p;
  std::vector<char> written;        // per output array
  std::vector<int64_t> sink_stage;  // the stage that folds into each sink, or -1
  std::string where;                // the stage and instruction at hand
  int64_t stage = 0;
  int64_t tile_rows = 0;  // rows of the largest tile

  explicit Checker(Program& program) : p(program), written(program.outputs.size(), 0), sink_stage(program.sinks.size(), -1) {}

  void bound(const std::string& what, int64_t v, int64_t low, int64_t high) const {
    if (v < low || v > high) reject(where, what + " is " + str(v) + ", not in " + str(low) + ".." + str(high));
  }

  int64_t count(const std::string& what, const std::vector<int64_t>& extents) const {
    if (extents.size() > kMaxLoopDims)
      reject(where, what + " has " + str(extents.size()) + " dimensions, more than " + str(kMaxLoopDims));
    Wide n = 1;
    for (int64_t e : extents) {
      bound(what + " extent", e, 1, kMaxCount);
      n *= e;
      if (n > kMaxCount) reject(where, what + " covers more than 2**48 elements");
    }
    return static_cast<int64_t>(n);
  }

  // The lowest and highest element that `offset + sum(i_d * strides_d)` names.
  void reach(const std::string& what, const Ref& ref, const std::vector<int64_t>& extents, const std::vector<int64_t>& strides,
             const char* verb) const {
    if (strides.size() != extents.size())
      reject(where, what + " has " + str(strides.size()) + " strides for " + str(extents.size()) + " dimensions");
    bound(what + " offset", ref.offset, -kMaxCount, kMaxCount);
    Wide low = ref.offset, high = ref.offset;
    for (size_t d = 0; d < extents.size(); ++d) {
      bound(what + " stride", strides[d], -kMaxCount, kMaxCount);
      (strides[d] < 0 ? low : high) += Wide{strides[d]} * (extents[d] - 1);
    }
    int64_t size = capacity(what, ref);
    if (low >= 0 && high < size) return;
    Wide bad = low < 0 ? low : high;
    std::string which =
        bad > kMaxCount * Wide{4096} || bad < -kMaxCount * Wide{4096} ? "far outside" : str(static_cast<int64_t>(bad)) + " of";
    std::string index = ref.space == Space::kScratch ? "" : " " + str(ref.index);
    reject(where, what + " " + verb + " element " + which + " " + space_name(ref.space) + index + ", which has " + str(size));
  }

  // Elements of the memory a reference names, after checking that it exists and has the reference's type.
  int64_t capacity(const std::string& what, const Ref& ref) const {
    auto exists = [&](size_t n) {
      if (ref.index < 0 || static_cast<size_t>(ref.index) >= n)
        reject(where, what + " names " + space_name(ref.space) + " " + str(ref.index) + ", but there are " + str(n));
    };
    auto typed = [&](DType t) {
      if (t != ref.dtype)
        reject(where, what + " takes " + space_name(ref.space) + " " + str(ref.index) + " as " + dtype_name(ref.dtype) +
                          ", but it is " + dtype_name(t));
    };
    int64_t item = static_cast<int64_t>(item_size(ref.dtype));
    switch (ref.space) {
      case Space::kIn:
        exists(p.inputs.size());
        typed(p.inputs[ref.index].dtype);
        return p.inputs[ref.index].elements;
      case Space::kOut:
        exists(p.outputs.size());
        typed(p.outputs[ref.index].dtype);
        return p.outputs[ref.index].elements;
      case Space::kScratch: exists(1); return p.stages[stage].scratch_bytes / item;
      case Space::kQueue: exists(p.queues.size()); return p.queues[ref.index].entry_bytes / item;
      default: {
        exists(p.preps.size());
        const Prep& prep = p.preps[ref.index];
        if (prep.kind != PrepKind::kDense) reject(where, what + " names prepared operand " + str(ref.index) + ", a packed weight");
        typed(prep.dtype);
        return product(prep.n_extents);
      }
    }
  }

  void access(const std::string& what, const Ref& ref, bool write) {
    if (ref.space == Space::kQueue && ref.index >= 0 && static_cast<size_t>(ref.index) < p.queues.size()) {
      const Ring& q = p.queues[ref.index];
      bool producer = q.producer == stage;
      bool consumer = std::find(q.consumers.begin(), q.consumers.end(), stage) != q.consumers.end();
      if (write ? !producer : !producer && !consumer)
        reject(where, what + (write ? " writes queue " : " reads queue ") + str(ref.index) + ", of which this stage is not the " +
                          (write ? "producer" : "producer or a consumer"));
    }
    if (write && (ref.space == Space::kIn || ref.space == Space::kPrep))
      reject(where, what + " writes " + space_name(ref.space) + " " + str(ref.index) + ", which is read-only");
    if (write && ref.space == Space::kOut && ref.index >= 0 && static_cast<size_t>(ref.index) < written.size())
      written[ref.index] = 1;
  }

  // An operand that loops over (rows * row_multiple, *extents).
  void operand(const std::string& what, const Operand& x, const std::vector<int64_t>& extents, bool write,
               int64_t row_multiple = 1) {
    access(what, x.ref, write);
    bool global = x.ref.space == Space::kIn || x.ref.space == Space::kOut;
    if (x.ref.space == Space::kPrep && x.row_stride != 0)
      reject(where, what + " has row stride " + str(x.row_stride) + " in a prepared operand, which has no rows");
    std::vector<int64_t> all_extents{(global ? p.rows : tile_rows) * row_multiple}, all_strides{x.row_stride};
    all_extents.insert(all_extents.end(), extents.begin(), extents.end());
    all_strides.insert(all_strides.end(), x.strides.begin(), x.strides.end());
    Wide walked = 1;  // each factor is at most kMaxCount, and so is what precedes it
    for (int64_t e : all_extents)
      if ((walked *= e) > kMaxCount) reject(where, what + " is walked over more than 2**48 elements, rows included");
    if (write && x.ref.space == Space::kOut && x.row_stride == 0 && all_extents[0] > 1)
      reject(where, what + " writes every row to the same place");
    reach(what, x.ref, all_extents, all_strides, write ? "writes" : "reads");
  }

  void copy(const Copy& x, bool gather) {
    count("extents", x.extents);
    if (x.array.space != (gather ? Space::kIn : Space::kOut) && !(gather && x.array.space == Space::kOut))
      reject(where,
             std::string("the array is a ") + space_name(x.array.space) + ", not an " + (gather ? "input or output" : "output"));
    if (x.array.dtype != x.tile.ref.dtype)
      reject(where, std::string("the array is ") + dtype_name(x.array.dtype) + " and the tile " + dtype_name(x.tile.ref.dtype) +
                        ": there is no conversion here");
    access("array", x.array, !gather);
    if (x.axis_strides.size() != p.axes.size())
      reject(where, "there are " + str(x.axis_strides.size()) + " axis strides for " + str(p.axes.size()) + " axes");
    std::vector<int64_t> extents = p.axes, strides = x.axis_strides;
    extents.insert(extents.end(), x.extents.begin(), x.extents.end());
    strides.insert(strides.end(), x.array_strides.begin(), x.array_strides.end());
    for (size_t j = 0; j < p.axes.size(); ++j)
      if (!gather && x.axis_strides[j] == 0 && p.axes[j] > 1) reject(where, "array writes every row of an axis to the same place");
    reach("array", x.array, extents, strides, gather ? "reads" : "writes");
    operand("tile", x.tile, x.extents, gather);
  }
  void check(const Gather& x) { copy(x, true); }
  void check(const Scatter& x) { copy(x, false); }

  void check(const Matmul& x) {
    bound("row_multiple", x.row_multiple, 1, kMaxCount);
    if (Wide{p.rows} * x.row_multiple > kMaxCount) reject(where, "rows times row_multiple is more than 2**48");
    bound("batch", x.batch, 1, kMaxCount);
    bound("weight", x.weight, 0, static_cast<int64_t>(p.preps.size()) - 1);
    const Prep& w = p.preps[x.weight];
    if (w.kind != PrepKind::kWeight) reject(where, "prepared operand " + str(x.weight) + " is not a weight");
    if (product(w.b_extents) != x.batch)
      reject(where, "batch " + str(x.batch) + ", but weight " + str(x.weight) + " has " + str(product(w.b_extents)));
    int64_t k = product(w.k_extents), n = product(w.n_extents);
    if (x.x.strides.size() != 1 || x.out.strides.size() != 1) reject(where, "x and out each have one batch stride");
    bool wide = w.dtype == DType::kF64;
    for (DType t : {x.x.ref.dtype, x.out.ref.dtype})
      if (!is_float(t) || (t == DType::kF64) != wide)
        reject(where, std::string("a ") + dtype_name(t) + " operand with a " + dtype_name(w.dtype) + " weight");
    auto with = [](Operand o) { return o.strides.push_back(1), o; };
    operand("x", with(x.x), {x.batch, k}, false, x.row_multiple);
    operand("out", with(x.out), {x.batch, n}, true, x.row_multiple);
    activation(x, wide);
    bound("bias", x.bias, -1, static_cast<int64_t>(p.preps.size()) - 1);
    if (x.bias < 0) return;
    const Prep& b = p.preps[x.bias];
    if (b.kind != PrepKind::kDense || product(b.n_extents) != n || b.dtype != (wide ? DType::kF64 : DType::kF32))
      reject(where,
             "bias " + str(x.bias) + " is not a dense operand of " + str(n) + (wide ? " float64" : " float32") + " elements");
  }

  void activation(const Matmul& x, bool wide) const {
    const size_t want = kActivationParameters[static_cast<int>(x.activation)];
    if (x.parameters.size() != want)
      reject(where, "its activation takes " + str(want) + " parameters, not " + str(x.parameters.size()));
    for (double v : x.parameters)
      if (!(v >= 0x1p-100 && v <= 0x1p100)) reject(where, "a parameter of its activation is not in 2**-100..2**100");
    if (wide && x.activation > Activation::kRelu) reject(where, "float64 sums have no such activation");
  }

  // Only products of bfloat16 can be multiplied in more than one way.
  void multiplied(Product product, DType t) const {
    if (product != Product::kBest && t != DType::kBF16)
      reject(where,
             "product is " + str(static_cast<int64_t>(product)) + ", which only bfloat16 can have, and this is " + dtype_name(t));
  }

  void check(const Vector& x) {
    count("extents", x.extents);
    for (size_t i = 0; i < x.loads.size(); ++i) operand("load " + str(i), x.loads[i], x.extents, false);
    for (size_t i = 0; i < x.stores.size(); ++i) operand("store " + str(i), x.stores[i], x.extents, true);
    if (x.collapse_rows) {
      for (const auto* list : {&x.loads, &x.stores})
        for (const Operand& o : *list)
          if (x.extents.empty() || Wide{x.extents[0]} * o.strides[0] != o.row_stride)
            reject(where, "collapse_rows, but an operand's rows and first extent are not one loop");
    }
    std::vector<int> types(kMaxRegisters, -1);
    std::string instruction = where;
    for (size_t i = 0; i < x.code.size(); ++i) {
      where = instruction + " operation " + str(i) + " (" + opcode_name(x.code[i].op) + ")";
      micro(x, x.code[i], types);
    }
    where = instruction;
  }

  void source(int64_t r, DType type, const std::vector<int>& types) const {
    bound("register", r, 0, kMaxRegisters - 1);
    if (types[r] < 0) reject(where, "register " + str(r) + " has no value yet");
    if (types[r] != static_cast<int>(type))
      reject(where, "register " + str(r) + " is " + dtype_name(static_cast<DType>(types[r])) + ", not " + dtype_name(type));
  }

  void micro(const Vector& x, const Micro& m, std::vector<int>& types) const {
    auto half = [](DType t) { return t == DType::kF16 || t == DType::kBF16; };
    if (m.op == Opcode::op_store) {
      bound("operand", m.a, 0, static_cast<int64_t>(x.stores.size()) - 1);
      bound("register", m.b, 0, kMaxRegisters - 1);
      if (types[m.b] < 0) reject(where, "register " + str(m.b) + " has no value yet");
      return;
    }
    if (half(m.type)) reject(where, std::string("a register cannot be ") + dtype_name(m.type));
    bound("register", m.dst, 0, kMaxRegisters - 1);
    DType result = m.type;
    if (m.op == Opcode::op_load) {
      bound("operand", m.a, 0, static_cast<int64_t>(x.loads.size()) - 1);
    } else if (m.op == Opcode::op_const) {
      if (m.imm.empty() || m.imm.size() > 2) reject(where, "a constant is one number, or two for a large integer");
    } else if (m.op == Opcode::op_convert) {
      if (static_cast<int>(m.from_type) < 0 || half(m.from_type)) reject(where, "the type to convert from is not a register's");
      source(m.a, m.from_type, types);
    } else if (m.op == Opcode::op_index) {
      bound("loop dimension", m.a, 0, static_cast<int64_t>(x.extents.size()));
      bound("divisor", m.b, 1, kMaxCount);
      bound("modulus", m.c, 1, kMaxCount);
      if (m.type == DType::kBool) reject(where, "an index cannot be bool");
    } else {
      const bool bits = m.op == Opcode::op_bitcast;
      if (bits && (static_cast<int>(m.from_type) < 0 || half(m.from_type) || item_size(m.from_type) != item_size(m.type)))
        reject(where, "the bits of its operand are not those of a " + std::string(dtype_name(m.type)));
      source(m.a, bits ? m.from_type : m.op == Opcode::op_select ? DType::kBool : m.type, types);
      if (operands_of(m.op) > 1) source(m.b, m.type, types);
      if (operands_of(m.op) > 2) source(m.c, m.type, types);
      if (gives_bool(m.op)) result = DType::kBool;
      immediates(m);
    }
    types[m.dst] = static_cast<int>(result);
  }

  void immediates(const Micro& m) const {
    auto whole = [&](size_t i, double low, double high) {
      double v = m.imm[i];
      if (!(v >= low && v <= high) || v != std::floor(v)) reject(where, "parameter " + str(i) + " is out of range");
    };
    size_t want = m.op == Opcode::op_integer_pow ? 1 : m.op == Opcode::op_reduce_precision ? 2 : m.imm.size();
    if (m.imm.size() != want) reject(where, "it takes " + str(want) + " parameters, not " + str(m.imm.size()));
    if (m.op == Opcode::op_integer_pow) whole(0, -2147483648.0, 2147483647.0);
    if (m.op == Opcode::op_reduce_precision) whole(0, 1, 11), whole(1, 0, 52);
  }

  std::vector<int64_t> loops(const std::vector<int64_t>& kept, const std::vector<int64_t>& reduced) const {
    std::vector<int64_t> all = kept;
    all.insert(all.end(), reduced.begin(), reduced.end());
    count("kept and reduced", all);
    return all;
  }

  void foldable(Reduction how, DType t) const {
    bool logical = how == Reduction::kAnd || how == Reduction::kOr || how == Reduction::kXor;
    if (logical ? is_float(t) : t == DType::kBool && how != Reduction::kMax && how != Reduction::kMin)
      reject(where, std::string(dtype_name(t)) + " values have no such reduction");
  }

  void check(const Reduce& x) {
    operand("x", x.x, loops(x.kept, x.reduced), false);
    operand("out", x.out, x.kept, true);
    if (x.how < Reduction::kArgMax) return foldable(x.how, x.x.ref.dtype);
    DType t = x.out.ref.dtype;
    if (x.reduced.size() != 1 || is_float(t) || t == DType::kBool)
      reject(where, "argmax and argmin reduce one dimension to an integer");
  }

  void check(const Scan& x) {
    count("extents", x.extents);
    if (x.extents.empty()) reject(where, "there is no dimension to scan");
    operand("x", x.x, x.extents, false);
    operand("out", x.out, x.extents, true);
    if (x.x.ref.dtype != x.out.ref.dtype) reject(where, "x and out differ in type");
    if (x.x.ref.dtype == DType::kBool || (x.how == Cumulative::kLogSumExp && !is_float(x.x.ref.dtype)))
      reject(where, std::string(dtype_name(x.x.ref.dtype)) + " values have no such cumulative operation");
  }

  void check(const Accumulate& x) {
    bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
    const Sink& s = p.sinks[x.sink];
    operand("x", x.x, loops(x.kept, x.reduced), false);
    if (product(x.kept) != s.elements)
      reject(where, "folds " + str(product(x.kept)) + " elements into a sink of " + str(s.elements));
    if (x.x.ref.dtype != s.dtype)
      reject(where, std::string("folds ") + dtype_name(x.x.ref.dtype) + " into a sink of " + dtype_name(s.dtype));
    fold_into(x.sink, false);
  }

  void check(const AccumulateMatmul& x) {
    bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
    bound("row_multiple", x.row_multiple, 1, kMaxCount);
    if (Wide{p.rows} * x.row_multiple > kMaxCount) reject(where, "rows times row_multiple is more than 2**48");
    count("product", {x.batch, x.m, x.n});
    const Sink& s = p.sinks[x.sink];
    if (x.batch * x.m * x.n != s.elements)
      reject(where, "adds " + str(x.batch * x.m * x.n) + " elements to a sink of " + str(s.elements));
    DType t = x.x.ref.dtype;
    if (!is_float(t) || x.y.ref.dtype != t)
      reject(where, std::string("multiplies ") + dtype_name(t) + " and " + dtype_name(x.y.ref.dtype));
    if (s.how != Reduction::kSum || s.dtype != (t == DType::kF64 ? DType::kF64 : DType::kF32))
      reject(where, std::string("a product of ") + dtype_name(t) + " cannot be added to a sink of " + dtype_name(s.dtype));
    multiplied(x.product, t);
    if (x.x.strides.size() != 1 || x.y.strides.size() != 1) reject(where, "x and y each have one batch stride");
    auto with = [](Operand o) { return o.strides.push_back(1), o; };
    operand("x", with(x.x), {x.batch, x.m}, false, x.row_multiple);
    operand("y", with(x.y), {x.batch, x.n}, false, x.row_multiple);
    fold_into(x.sink, true);
  }

  // One stage owns a sink, and folds into it in one way: products accumulate in the sink's type, sums of values in a wider one.
  void fold_into(int64_t sink, bool products) {
    int64_t& owner = sink_stage[sink];
    if (owner >= 0 && owner != stage) reject(where, "sink " + str(sink) + " is already folded by stage " + str(owner));
    if (owner >= 0 && p.sinks[sink].products != products) reject(where, "sink " + str(sink) + " takes both values and products");
    owner = stage;
    p.sinks[sink].products = products;
  }

  void preps() {
    Wide indices = 0;
    for (size_t i = 0; i < p.preps.size(); ++i) {
      const Prep& x = p.preps[i];
      where = "kitsune program: prepared operand " + str(i);
      if (x.source.space != Space::kIn) reject(where, "its source is not an input");
      count("b", x.b_extents), count("k", x.k_extents), count("n", x.n_extents);
      if (x.kind == PrepKind::kDense && (!x.b_extents.empty() || !x.k_extents.empty()))
        reject(where, "a dense operand has only n extents");
      if (x.kind == PrepKind::kDense && x.product != Product::kBest) reject(where, "a dense operand is no product");
      std::vector<int64_t> extents, strides;
      for (auto* list : {&x.b_extents, &x.k_extents, &x.n_extents}) extents.insert(extents.end(), list->begin(), list->end());
      for (auto* list : {&x.b_strides, &x.k_strides, &x.n_strides}) strides.insert(strides.end(), list->begin(), list->end());
      Wide n = 1;
      for (int64_t e : extents) n = std::min<Wide>(n * e, kMaxCount);
      if (n > kMaxCount / 4096) reject(where, "it covers more than 2**36 elements");
      if (x.b_strides.size() != x.b_extents.size() || x.k_strides.size() != x.k_extents.size())
        reject(where, "strides and extents differ in number");
      reach("source", x.source, extents, strides, "reads");
      if (x.kind != PrepKind::kWeight) continue;
      DType s = x.source.dtype, t = x.dtype;
      bool widens = t == DType::kF64 || (t == DType::kF32 && s != DType::kF64);
      indices += Wide{product(x.b_extents)} + product(x.k_extents) + product(x.n_extents);
      if (indices > kMaxWeightIndices) reject(where, "the sides of the weights so far have more than 2**24 indices together");
      if (!is_float(s) || !is_float(t) || !(s == t || widens))
        reject(where, std::string("a weight of ") + dtype_name(s) + " cannot be prepared as " + dtype_name(t));
      multiplied(x.product, t);
    }
  }

  void arrays() {
    where = "kitsune program";
    count("axes", p.axes);
    p.rows = product(p.axes);
    bound("tile_rows", p.tile_rows, 1, kMaxCount);
    bound("workers", p.workers, 1, kMaxWorkers);
    p.tiles = (p.rows + p.tile_rows - 1) / p.tile_rows;
    tile_rows = std::min(p.tile_rows, p.rows);
    for (const Array& a : p.inputs) bound("elements of an input", a.elements, 0, kMaxCount);
    for (const Array& a : p.outputs) bound("elements of an output", a.elements, 0, kMaxCount);
    std::vector<char> taken(p.outputs.size(), 0);
    for (size_t i = 0; i < p.sinks.size(); ++i) {
      const Sink& s = p.sinks[i];
      where = "kitsune program: sink " + str(i);
      bound("output", s.out, 0, static_cast<int64_t>(p.outputs.size()) - 1);
      if (p.outputs[s.out].elements != s.elements || s.elements < 1)
        reject(where, "has " + str(s.elements) + " elements and output " + str(s.out) + " has " + str(p.outputs[s.out].elements));
      if (taken[s.out]) reject(where, "output " + str(s.out) + " already belongs to another sink");
      foldable(s.how, s.dtype);
      taken[s.out] = written[s.out] = 1;
    }
  }

  void queues() {
    int64_t stages = static_cast<int64_t>(p.stages.size());
    if (Wide{p.tiles} * stages > kMaxCount)
      reject("kitsune program", "there are more than 2**48 tiles, those of every stage counted");
    std::vector<std::vector<int64_t>> next(stages);
    std::vector<int64_t> read_by(stages, -1);  // the last queue that lists a stage
    for (size_t i = 0; i < p.queues.size(); ++i) {
      const Ring& q = p.queues[i];
      where = "kitsune program: queue " + str(i);
      bound("producer", q.producer, 0, stages - 1);
      bound("depth", q.depth, 1, int64_t{1} << 20);
      bound("entry_bytes", q.entry_bytes, 1, int64_t{1} << 40);
      if (Wide{q.depth} * q.entry_bytes > (Wide{1} << 44)) reject(where, "takes more than 2**44 bytes");
      if (q.consumers.empty()) reject(where, "has no consumer");
      for (int64_t s : q.consumers) {
        bound("consumer", s, 0, stages - 1);
        if (read_by[s] == static_cast<int64_t>(i)) reject(where, "lists consumer " + str(s) + " twice");
        read_by[s] = static_cast<int64_t>(i);
        if (p.stages[s].phase != p.stages[q.producer].phase)
          reject(where, "joins stage " + str(q.producer) + " and stage " + str(s) + ", which are in different phases");
        next[q.producer].push_back(s);
      }
    }
    // Kahn's algorithm: what is left over lies on or behind a cycle.
    std::vector<int64_t> incoming(stages, 0), ready;
    for (auto& list : next)
      for (int64_t s : list) ++incoming[s];
    for (int64_t s = 0; s < stages; ++s)
      if (incoming[s] == 0) ready.push_back(s);
    for (size_t i = 0; i < ready.size(); ++i)
      for (int64_t s : next[ready[i]])
        if (--incoming[s] == 0) ready.push_back(s);
    for (int64_t s = 0; s < stages; ++s)
      if (incoming[s] != 0)
        reject("kitsune program",
               "stage " + str(s) + " '" + p.stages[s].name + "' waits for its own output: the queues form a cycle");
  }

  void all() {
    arrays();
    preps();
    where = "kitsune program";
    if (p.stages.empty()) reject(where, "there is no stage");
    for (stage = 0; stage < static_cast<int64_t>(p.stages.size()); ++stage) {
      where = "kitsune program: stage " + str(stage) + " '" + p.stages[stage].name + "'";
      bound("phase", p.stages[stage].phase, 0, static_cast<int64_t>(p.stages.size()) - 1);
      bound("scratch_bytes", p.stages[stage].scratch_bytes, 0, int64_t{1} << 40);
    }
    queues();
    for (stage = 0; stage < static_cast<int64_t>(p.stages.size()); ++stage) {
      Stage& s = p.stages[stage];
      for (size_t i = 0; i < s.body.size(); ++i) {
        where = "kitsune program: stage " + str(stage) + " '" + s.name + "' instruction " + str(i) + " (" +
                kInstructionNames[s.body[i].index()] + ")";
        std::visit([this](const auto& x) { check(x); }, s.body[i]);
      }
    }
    where = "kitsune program";
    for (size_t i = 0; i < p.sinks.size(); ++i)
      if (sink_stage[i] < 0) reject(where, "nothing is folded into sink " + str(i));
    for (size_t i = 0; i < p.outputs.size(); ++i)
      if (!written[i] && p.outputs[i].elements > 0) reject(where, "output " + str(i) + " is never written");
  }
};

}  // namespace

void validate(Program& program) { Checker(program).all(); }

}  // namespace kitsune::cpu
