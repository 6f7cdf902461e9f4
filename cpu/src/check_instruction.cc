// Whether an instruction's types, sizes and operands fit together. Vector programs are checked in check_vector.cc.
#include <algorithm>

#include "checker.h"

namespace kitsune::cpu {

void Checker::copy(const Copy& x, bool load) {
  tiles_only();
  count("extents", x.extents);
  if (x.array.space != (load ? Space::kIn : Space::kOut) && !(load && x.array.space == Space::kOut))
    reject(where, std::string("the array is a ") + space_name(x.array.space) + ", not an " + (load ? "input or output" : "output"));
  if (x.array.dtype != x.tile.ref.dtype)
    reject(where, std::string("the array is ") + dtype_name(x.array.dtype) + " and the tile " + dtype_name(x.tile.ref.dtype) +
                      ": there is no conversion here");
  access("array", x.array, !load);
  if (x.axis_strides.size() != p.axes.size())
    reject(where, "there are " + str(x.axis_strides.size()) + " axis strides for " + str(p.axes.size()) + " axes");
  std::vector<int64_t> extents = p.axes, strides = x.axis_strides;
  extents.insert(extents.end(), x.extents.begin(), x.extents.end());
  strides.insert(strides.end(), x.array_strides.begin(), x.array_strides.end());
  for (size_t j = 0; j < p.axes.size(); ++j)
    if (!load && x.axis_strides[j] == 0 && p.axes[j] > 1) reject(where, "array writes every row of an axis to the same place");
  reach("array", x.array, extents, strides, load ? "reads" : "writes");
  operand("tile", x.tile, x.extents, load);
}
void Checker::check(const Matmul& x) {
  bound("row_multiple", x.row_multiple, 1, kMaxCount);
  if (Wide{p.rows} * x.row_multiple > kMaxCount) reject(where, "rows times row_multiple is more than 2**48");
  bound("batch", x.batch, 1, kMaxCount);
  bound("weight", x.weight, 0, static_cast<int64_t>(p.preps.size()) - 1);
  const Prep& w = p.preps[x.weight];
  if (w.kind != PrepKind::kWeight) reject(where, "prepared operand " + str(x.weight) + " is not a weight");
  prepared(x.weight);
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
  if (x.adds && (w.dtype != DType::kF32 || x.out.ref.dtype != DType::kF32))
    reject(where, "only a product of float32 adds to what is in out");
  if (x.rounds != DType::kF32 && (wide || x.adds || (x.rounds != DType::kF16 && x.rounds != DType::kBF16)))
    reject(where, std::string("sums of ") + dtype_name(w.dtype) + " that are rounded to " + dtype_name(x.rounds));
  activation(x, wide);
  bound("bias", x.bias, -1, static_cast<int64_t>(p.preps.size()) - 1);
  if (x.bias < 0) return;
  const Prep& b = p.preps[x.bias];
  prepared(x.bias);
  if (b.kind != PrepKind::kDense || product(b.n_extents) != n || b.dtype != (wide ? DType::kF64 : DType::kF32))
    reject(where, "bias " + str(x.bias) + " is not a dense operand of " + str(n) + (wide ? " float64" : " float32") + " elements");
}

void Checker::activation(const Matmul& x, bool wide) const {
  const size_t want = kActivationParameters[static_cast<int>(x.activation)];
  if (x.parameters.size() != want)
    reject(where, "its activation takes " + str(want) + " parameters, not " + str(x.parameters.size()));
  for (double v : x.parameters)
    if (!(v >= 0x1p-100 && v <= 0x1p100)) reject(where, "a parameter of its activation is not in 2**-100..2**100");
  if (wide && x.activation > Activation::kRelu) reject(where, "float64 sums have no such activation");
}

// Only products of bfloat16 can be multiplied in more than one way.
void Checker::multiplied(Product product, DType t) const {
  if (product != Product::kBest && t != DType::kBF16)
    reject(where,
           "product is " + str(static_cast<int64_t>(product)) + ", which only bfloat16 can have, and this is " + dtype_name(t));
}

std::vector<int64_t> Checker::loops(const std::vector<int64_t>& kept, const std::vector<int64_t>& reduced) const {
  std::vector<int64_t> all = kept;
  all.insert(all.end(), reduced.begin(), reduced.end());
  count("kept and reduced", all);
  return all;
}

void Checker::foldable(Reduction how, DType t) const {
  bool logical = how == Reduction::kAnd || how == Reduction::kOr || how == Reduction::kXor;
  if (logical ? is_float(t) : t == DType::kBool && how != Reduction::kMax && how != Reduction::kMin)
    reject(where, std::string(dtype_name(t)) + " values have no such reduction");
}

void Checker::check(const Reduce& x) {
  operand("x", x.x, loops(x.kept, x.reduced), false);
  operand("out", x.out, x.kept, true);
  if (x.how < Reduction::kArgMax) return foldable(x.how, x.x.ref.dtype);
  DType t = x.out.ref.dtype;
  if (x.reduced.size() != 1 || is_float(t) || t == DType::kBool)
    reject(where, "argmax and argmin reduce one dimension to an integer");
}

void Checker::check(const Scan& x) {
  count("extents", x.extents);
  if (x.extents.empty()) reject(where, "there is no dimension to scan");
  operand("x", x.x, x.extents, false);
  operand("out", x.out, x.extents, true);
  if (x.x.ref.dtype != x.out.ref.dtype) reject(where, "x and out differ in type");
  if (x.x.ref.dtype == DType::kBool || (x.how == Cumulative::kLogSumExp && !is_float(x.x.ref.dtype)))
    reject(where, std::string(dtype_name(x.x.ref.dtype)) + " values have no such cumulative operation");
}

void Checker::check(const Accumulate& x) {
  tiles_only();
  bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
  const Sink& s = p.sinks[x.sink];
  operand("x", x.x, loops(x.kept, x.reduced), false);
  std::vector<int64_t> strides = x.sum_strides;
  if (strides.empty()) {
    if (product(x.kept) != s.elements)
      reject(where, "folds " + str(product(x.kept)) + " elements into a sink of " + str(s.elements));
    strides.assign(x.kept.size(), 0);
    for (size_t d = x.kept.size(), step = 1; d-- > 0; step *= static_cast<size_t>(x.kept[d]))
      strides[d] = static_cast<int64_t>(step);
  }
  sums(x.sums, x.kept, strides, s.elements);
  if (x.x.ref.dtype != s.dtype)
    reject(where, std::string("folds ") + dtype_name(x.x.ref.dtype) + " into a sink of " + dtype_name(s.dtype));
  fold_into(x.sink, Fold::kValues);
}

void Checker::check(const AccumulateMatmul& x) {
  tiles_only();
  bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
  bound("row_multiple", x.row_multiple, 1, kMaxCount);
  if (Wide{p.rows} * x.row_multiple > kMaxCount) reject(where, "rows times row_multiple is more than 2**48");
  count("product", {x.batch, x.m, x.n});
  Sink& s = p.sinks[x.sink];
  std::vector<int64_t> of = x.matrices.empty() ? std::vector<int64_t>{x.m, x.m, x.n} : x.matrices;
  if (of.size() != 3) reject(where, "matrices has neither 0 nor 3 numbers");
  const Wide each = count("matrices", {of[0], of[2]});
  bound("matrices", of[1], 1, of[0]);
  if (each * x.batch != s.elements)
    reject(where, "adds " + str(x.batch) + " matrices of " + str(static_cast<int64_t>(each)) + " elements to a sink of " +
                      str(s.elements));
  if (s.columns != 0 && (s.height != of[0] || s.rows != of[1] || s.columns != of[2]))
    reject(where, "sink " + str(x.sink) + " is fed by products of other shapes");
  s.height = of[0], s.rows = of[1], s.columns = of[2];
  const bool of_rows = x.n == s.columns && (x.m == s.rows || x.m == s.height % s.rows);
  const bool of_columns = x.m == s.height && x.m == s.rows && x.n <= s.columns;
  if (!of_rows && !of_columns) reject(where, "a product of " + str(x.m) + " x " + str(x.n) + " is no part of its sink's matrices");
  sums(x.sums, {x.batch, x.m * x.n}, {static_cast<int64_t>(each), 1}, s.elements);
  const int64_t part = of_rows ? s.rows * s.columns : kSumGroup * s.height;
  bool aligned = x.sums.offset % part == 0;
  for (int64_t stride : x.sums.loop_strides) aligned &= stride % part == 0;
  if (!aligned) reject(where, "sums do not begin with a part of its sink's matrices");
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
  fold_into(x.sink, Fold::kProducts);
}

// Accumulators over `extents` at `strides`, from where `x` says, are those of a sink of `elements`.
void Checker::sums(const Sums& x, const std::vector<int64_t>& extents, const std::vector<int64_t>& strides,
                   int64_t elements) const {
  if (strides.size() != extents.size()) reject(where, "sums has " + str(strides.size()) + " strides, not " + str(extents.size()));
  if (x.loop_strides.size() > counts.size())
    reject(where, "sums has strides for " + str(x.loop_strides.size()) + " loops, inside of " + str(counts.size()));
  bound("sums offset", x.offset, 0, kMaxCount);
  Wide last = x.offset;
  auto extend = [&](int64_t extent, int64_t stride) {
    bound("sums stride", stride, 0, kMaxCount);
    last += Wide{stride} * (extent - 1);
  };
  for (size_t d = 0; d < extents.size(); ++d) extend(extents[d], strides[d]);
  for (size_t l = 0; l < x.loop_strides.size(); ++l) extend(counts[l], x.loop_strides[l]);
  if (last >= elements) reject(where, "folds beyond the " + str(elements) + " elements of its sink");
}

// One stage owns a sink, and folds into it in one way: products accumulate in the sink's type, sums of values in a wider one.
void Checker::fold_into(int64_t sink, Fold fed) {
  int64_t& owner = sink_stage[sink];
  if (owner >= 0 && owner != stage) reject(where, "sink " + str(sink) + " is already folded by stage " + str(owner));
  if (owner >= 0 && p.sinks[sink].fed != fed) reject(where, "sink " + str(sink) + " is fed in two ways");
  if (p.sinks[sink].per_batch() && fed != Fold::kValues && fed != Fold::kProducts)
    reject(where, "sink " + str(sink) + " is one for each batch, and folds by indices");
  owner = stage;
  p.sinks[sink].fed = fed;
}

void Checker::tiles_only() const {
  if (stationary) reject(where, "works on tiles, and stands where there are no rows");
}

void Checker::prepared(int64_t prep) const {
  if (p.preps[prep].local && !packed[prep]) reject(where, "prepared operand " + str(prep) + " is not packed before");
}

void Checker::indexed(const Operand& index, int64_t rows, const std::vector<int64_t>& index_extents) {
  DType t = index.ref.dtype;
  if (is_float(t) || t == DType::kBool) reject(where, std::string("an index cannot be ") + dtype_name(t));
  bound("count", rows, 1, kMaxCount);
  count("index_extents", index_extents);
  operand("index", index, index_extents, false);
}

void Checker::filled(const std::vector<double>& fill) const {
  if (fill.size() != 1 && fill.size() != 2) reject(where, "fill is one number, or two for a large integer");
}

// A table of `rows` rows, any of which is read.
void Checker::table(const char* what, const Operand& x, int64_t rows, const std::vector<int64_t>& row) {
  access(what, x.ref, false);
  std::vector<int64_t> extents{rows}, strides{x.row_stride};
  extents.insert(extents.end(), row.begin(), row.end());
  strides.insert(strides.end(), x.strides.begin(), x.strides.end());
  count("extents", row);
  reach(what, x.ref, extents, strides, "reads");
}

void Checker::check(const Gather& x) {
  indexed(x.index, x.count, x.index_extents);
  DType t = x.out.ref.dtype;
  if (x.table.ref.dtype != t)
    reject(where, std::string("the table is ") + dtype_name(x.table.ref.dtype) + " and the tile " + dtype_name(t));
  filled(x.fill);
  table("table", x.table, x.count, x.extents);
  operand("out", x.out, loops(x.index_extents, x.extents), true);
}

void Checker::folds(const AccumulateAt& x) {
  tiles_only();
  indexed(x.index, x.count, x.index_extents);
  bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
  const Sink& s = p.sinks[x.sink];
  Wide elements = Wide{x.count} * count("extents", x.extents);
  if (elements != s.elements)
    reject(where, "folds into " + str(x.count) + " rows that are not those of a sink of " + str(s.elements));
  if (x.x.ref.dtype != s.dtype && compute_type(x.x.ref.dtype) != s.dtype)
    reject(where, std::string("folds ") + dtype_name(x.x.ref.dtype) + " into a sink of " + dtype_name(s.dtype));
}

void Checker::check(const AccumulateAt& x) {
  folds(x);
  operand("x", x.x, loops(x.index_extents, x.extents), false);
  rows_of(x);
}

// What is asked of the rows that are folded, once they are known to lie in memory.
void Checker::rows_of(const AccumulateAt& x) {
  int64_t step = 1;
  for (size_t d = x.extents.size(); d-- > 0; step *= x.extents[d])
    if (x.extents[d] > 1 && x.x.strides[x.index_extents.size() + d] != step)
      reject(where, "the elements of a row of x are not dense");
  if (x.ordered && (p.order < 0 || x.x.ref.space != Space::kIn || product(x.index_extents) != 1))
    reject(where, "x is read in the order of the stream; it must be an input with one index for each row");
  if (x.sorted && (sink_stage[x.sink] >= 0 || !counts.empty()))
    reject(where, "sink " + str(x.sink) + " with sorted indices is fed twice");
  fold_into(x.sink, x.sorted ? Fold::kSegments : Fold::kRows);
  p.sinks[x.sink].rows = x.count;
}

void Checker::check(const AccumulateScaled& x) {
  check(static_cast<const AccumulateAt&>(x));
  scaled(x);
}

void Checker::scaled(const AccumulateScaled& x) {
  Sink& s = p.sinks[x.sink];
  if (!x.sorted || x.ordered || !x.index_extents.empty() || x.x.row_stride <= 0)
    reject(where, "a scaled sum takes rows of a tile by sorted indices, one for each row");
  if (s.how != Reduction::kSum || s.dtype != DType::kF32) reject(where, "a scaled sum is of float32");
  const DType t = x.top.ref.dtype;
  if (!is_float(t) || compute_type(t) != DType::kF32) reject(where, std::string("its tops are ") + dtype_name(t));
  bound("heads", x.heads, 1, product(x.extents));
  if (product(x.extents) % x.heads != 0) reject(where, str(x.heads) + " heads do not share out a row");
  operand("top", x.top, {x.heads}, false);
  s.heads = x.heads, s.finite = x.finite;
}

void Checker::check(const AccumulateTaken& x) {
  folds(x);
  table("x", x.x, x.rows, x.extents);
  if (!x.sorted || x.ordered || !x.index_extents.empty() || x.x.row_stride <= 0 || p.sinks[x.sink].how != Reduction::kSum ||
      p.sinks[x.sink].dtype != DType::kF32)
    reject(where, "rows of a table are added up by sorted indices, one for each row of the tile, in float32");
  rows_of(x);
  bound("heads", x.heads, 0, kMaxCount);
  if (x.heads > 0) scaled(x);
  filled(x.fill);
  indexed(x.taken, x.rows, {});
  bound("factors", x.factors, 0, product(x.extents));
  if (x.factors == 0) return;
  if (product(x.extents) % x.factors != 0) reject(where, str(x.factors) + " factors do not share out a row");
  if (x.factor.ref.dtype != DType::kF32) reject(where, std::string("its factors are ") + dtype_name(x.factor.ref.dtype));
  operand("factor", x.factor, {x.factors}, false);
  if (x.factors > 1 && x.factor.strides[0] != 1) reject(where, "the factors of a row are not dense");
}

void Checker::check(const TakenDot& x) {
  tiles_only();
  bound("heads", x.heads, 1, kMaxCount);
  bound("inner", x.inner, 1, kMaxCount);
  const int64_t width = count("heads and inner", {x.heads, x.inner});
  const DType t = x.x.x.ref.dtype, out = x.out.ref.dtype;
  if (!is_float(t) || compute_type(t) != DType::kF32 || x.y.x.ref.dtype != t || !is_float(out) || compute_type(out) != DType::kF32)
    reject(where, std::string("makes ") + dtype_name(out) + " of " + dtype_name(t) + " and " + dtype_name(x.y.x.ref.dtype));
  for (const Rows* r : {&x.x, &x.y}) {
    const char* const what = r == &x.x ? "x" : "y";
    if (r->x.strides != std::vector<int64_t>{1}) reject(where, std::string("the elements of a row of ") + what + " are not dense");
    if (r->rows == 0) {
      operand(what, r->x, {width}, false);
      continue;
    }
    indexed(r->taken, r->rows, {});
    filled(r->fill);
    table(what, r->x, r->rows, {width});
  }
  operand("out", x.out, {x.heads}, true);
  if (x.out.strides[0] != 1 || x.out.row_stride < x.heads) reject(where, "rows of out overlap, or are not dense");
}

void Checker::check(const RunMax& x) {
  tiles_only();
  indexed(x.index, x.count, {});
  const DType t = x.x.ref.dtype;
  if (!is_float(t) || compute_type(t) != DType::kF32 || x.out.ref.dtype != t)
    reject(where, std::string("makes ") + dtype_name(x.out.ref.dtype) + " of " + dtype_name(t));
  count("extents", x.extents);
  operand("x", x.x, x.extents, false);
  operand("out", x.out, x.extents, true);
  if (x.out.row_stride < product(x.extents)) reject(where, "rows of out overlap");
  for (const Operand* o : {&x.x, &x.out}) {
    int64_t step = 1;
    for (size_t d = x.extents.size(); d-- > 0; step *= x.extents[d])
      if (x.extents[d] > 1 && o->strides[d] != step) reject(where, "the elements of a row are not dense");
  }
}

void Checker::select(const Select& x, bool takes) {
  bound("inner", x.inner, 1, kMaxCount);
  bound("indices", x.indices, 1, kMaxCount);
  indexed(x.index, x.count, {x.indices});
  if (x.index.row_stride != 0) reject(where, "its indices depend on the row");
  if (Wide{x.count} * x.inner > INT32_MAX || Wide{x.indices} * x.inner > INT32_MAX) reject(where, "a dimension is too long");
  if (x.x.ref.dtype != x.out.ref.dtype)
    reject(where, std::string("selects ") + dtype_name(x.x.ref.dtype) + " as " + dtype_name(x.out.ref.dtype));
  auto check = [&](const char* what, const Operand& o, int64_t extent, bool write) {
    const size_t rank = x.outer.size() + 1;
    if (o.strides.size() != rank) reject(where, std::string(what) + " has " + str(o.strides.size()) + " strides, not " + str(rank));
    Operand with = o;
    std::vector<int64_t> extents = x.outer;
    extents.insert(extents.end(), {extent, x.inner});
    with.strides.push_back(1);
    count(what, extents);
    operand(what, with, extents, write);
    if (extent > 1 && o.strides.back() != x.inner) reject(where, std::string(what) + " is not dense along what is selected");
  };
  check("x", x.x, takes ? x.count : x.indices, false);
  check("out", x.out, takes ? x.indices : x.count, true);
}

void Checker::check(const Take& x) {
  filled(x.fill);
  select(x, true);
}

void Checker::check(const Put& x) {
  if (x.x.ref.dtype == DType::kBool) reject(where, "bool values have no sum");
  select(x, false);
}

void Checker::check(const Pack& x) {
  bound("prep", x.prep, 0, static_cast<int64_t>(p.preps.size()) - 1);
  if (!p.preps[x.prep].local) reject(where, "prepared operand " + str(x.prep) + " is prepared before any stage runs");
  prep(p.preps[x.prep]);
  packed[x.prep] = 1;
}

void Checker::check(const Dot& x) {
  count("product", {x.batch, x.m, x.n, x.k});
  DType t = x.x.ref.dtype;
  bool wide = t == DType::kF64;
  if (!is_float(t) || x.y.ref.dtype != t)
    reject(where, std::string("multiplies ") + dtype_name(t) + " and " + dtype_name(x.y.ref.dtype));
  if (!is_float(x.out.ref.dtype) || (x.out.ref.dtype == DType::kF64) != wide)
    reject(where, std::string("a ") + dtype_name(x.out.ref.dtype) + " result of " + dtype_name(t) + " operands");
  if (x.x.strides.size() != 2 || x.y.strides.size() != 3 || x.out.strides.size() != 2)
    reject(where, "x and out have two strides, and y three");
  auto with = [](Operand o) { return o.strides.push_back(1), o; };
  operand("x", with(x.x), {x.batch, x.m, x.k}, false);
  operand("y", x.y, {x.batch, x.n, x.k}, false);
  operand("out", with(x.out), {x.batch, x.m, x.n}, true);
  if (x.k > (int64_t{1} << 24) || x.n > (int64_t{1} << 24)) reject(where, "a side of y has more than 2**24 elements");
}

}  // namespace kitsune::cpu
