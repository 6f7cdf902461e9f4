// The parser and the validator: damaged words, what their messages say, and sizes that must neither wrap nor be allocated.
#include <sys/resource.h>

#include "batch_programs.h"

namespace kitsune::cpu::test {
namespace {

bool rejected(const std::vector<int64_t>& words, std::string* why = nullptr) {
  try {
    Executable exe(parse(words.data(), words.size()));
    return false;
  } catch (const ProgramError& e) {
    if (why != nullptr) *why = e.what();
    return true;
  }
}

void expect(const std::vector<int64_t>& words, const char* what) {
  std::string why;
  CHECK(rejected(words, &why), "accepted, though %s", what);
  CHECK(why.find(what) != std::string::npos, "\"%s\" does not say \"%s\"", why.c_str(), what);
}
void expect(const Program& p, const char* what) { expect(encode(p), what); }
void expect(const Call& c, const char* what) { expect(encode(c), what); }

double work(const Program& p) {
  double w = static_cast<double>(p.rows + p.tile_rows);
  for (const Ring& q : p.queues) w += static_cast<double>(q.depth) * static_cast<double>(q.entry_bytes);
  for (const auto* list : {&p.inputs, &p.outputs})
    for (const Array& a : *list) w += static_cast<double>(a.elements);
  for (const Stage& s : p.stages) w += static_cast<double>(s.scratch_bytes);
  return w;
}

// Every bit of every word, one at a time: as it is (the checksum finds it), and resealed (the validator rejects it, or it runs in
// bounds).
void test_damage() {
  Program small = residual_pipeline(13, 4, 2);
  std::vector<int64_t> words = encode(small);
  CHECK(!rejected(words), "the undamaged program is rejected");
  for (size_t n = 0; n < words.size(); ++n)
    CHECK(rejected({words.begin(), words.begin() + static_cast<std::ptrdiff_t>(n)}), "truncated to %zu words", n);
  int ran = 0;
  for (size_t w = 0; w < words.size(); ++w)
    for (int bit = 0; bit < 64; ++bit) {
      std::vector<int64_t> damaged = words;
      damaged[w] = static_cast<int64_t>(static_cast<uint64_t>(damaged[w]) ^ (uint64_t{1} << bit));
      CHECK(rejected(damaged), "bit %d of word %zu", bit, w);
      if (w < kHeaderWords) continue;
      reseal(damaged);
      try {
        Executable exe(parse(damaged.data(), damaged.size()));
        if (exe.call().parts.empty() || work(exe.call().parts[0].program) > 1e5 || ran > 2000) continue;
        if (exe.estimated_ns() > 1e6) continue;
        Arrays a(exe.call(), 1);
        ThreadPool pool(1);
        exe.run(a.in_pointers.data(), a.out_pointers.data(), pool);
        ++ran;
      } catch (const ProgramError&) {
      }
    }
  CHECK(ran > 50, "only %d altered programs ran: the test does not test", ran);
}

void test_messages() {
  std::vector<int64_t> words = encode(residual_pipeline(13, 4, 2));
  words[9] ^= 1;
  std::string why;
  CHECK(rejected(words, &why) && why == "kitsune program: checksum mismatch: the attribute was truncated or altered", "%s",
        why.c_str());
  Program p = residual_pipeline(13, 4, 2);
  p.inputs[0].elements -= 1;
  expect(p, "stage 0 'first' instruction 0 (Matmul): x reads element 155 of input 0, which has 155");
  p = residual_pipeline(13, 4, 2);
  p.queues[0].consumers = {2};
  expect(p, "x reads queue 0, of which this stage is not the producer or a consumer");
  p = residual_pipeline(13, 4, 2);
  p.queues.push_back({2, {0}, 4, 64});
  expect(p, "the queues form a cycle");
  p = residual_pipeline(13, 4, 2);
  p.queues[0].depth = 0;
  expect(p, "depth is 0");
  p = residual_pipeline(13, 4, 2);
  std::get<Vector>(p.stages[2].body[0]).code[2].b = 9;
  expect(p, "operation 2 (add): register 9 has no value yet");
  p = residual_pipeline(13, 4, 2);
  p.stages[2].scratch_bytes = 16;
  expect(p, "of scratch, which has 4");
  p = residual_pipeline(13, 4, 2);
  std::get<Vector>(p.stages[2].body[0]).loads[0].row_stride = int64_t{1} << 62;
  expect(p, "stride");
  p = residual_pipeline(13, 4, 2);
  std::get<Vector>(p.stages[2].body[0]).extents = {int64_t{1} << 40, int64_t{1} << 40};
  expect(p, "more than 2**48");
  p = residual_pipeline(13, 4, 2);
  p.outputs.push_back({F32, 4});
  expect(p, "output 3 is never written");
}

// Parts that do not fit together.
void test_parts() {
  auto with = [](auto change) {
    Call c = residual_call(13, 4, 2);
    change(c);
    return c;
  };
  std::string why;
  CHECK(!rejected(encode(with([](Call&) {})), &why), "%s", why.c_str());
  expect(with([](Call& c) { c.operands = 9; }), "9 operands and 4 results of 8 arrays");
  expect(with([](Call& c) { c.results = -1; }), "4 operands and -1 results of 8 arrays");
  expect(with([](Call& c) { c.parts[0].phase = 2; }), "'test' runs in phase 1, which is not in 2..");
  expect(with([](Call& c) { c.parts[1].phase = 0; }), "'test' reads array 5, which no earlier phase writes");
  expect(with([](Call& c) { c.parts[1].phase = kMaxPhases + 1; }), "runs in phase 1048577");
  expect(with([](Call& c) { c.parts[1].reads.pop_back(); }), "'test' reads 1 arrays, but the program wants 2");
  expect(with([](Call& c) { c.parts[1].reads[0] = 8; }), "'test' reads array 8, but there are 8");
  expect(with([](Call& c) { c.parts[1].reads[0] = -1; }), "'test' reads array -1");
  expect(with([](Call& c) { c.parts[1].reads[0] = 4; }), "'test' reads array 4, which has 260 of float32, as 13 of float32");
  expect(with([](Call& c) { c.parts[1].writes[0] = 5; }), "'test' writes array 5, which is there already");
  expect(with([](Call& c) { c.parts[1].writes[0] = 0; }), "'test' writes array 0, which has 156");
  expect(with([](Call& c) { c.parts.pop_back(); }), "array 7 is never written");
  expect(with([](Call& c) { c.arrays.push_back({F32, 3}); }), "array 8 is never written");
  expect(with([](Call& c) { c.arrays[7].dtype = I32; }), "'test' writes array 7, which has 13 of int32, as 13 of float32");
  Call large = two_phases();  // an array between the phases that nothing the call reads or gives is in proportion to
  large.arrays[2].elements = int64_t{1} << 40;
  for (Part& part : large.parts) {
    Program& p = part.program;
    (part.phase == 0 ? p.outputs[0] : p.inputs[0]).elements = int64_t{1} << 40;
  }
  expect(large, "the arrays between phases would take");
}

// What reaches outside of memory in the last iteration, the last batch or the last row of a table; and what is not packed yet.
void test_structure() {
  auto in = [](Program p, size_t i, auto change) {
    change(p, p.stages[0].body[i]);
    return p;
  };
  auto batched = [&](size_t i, auto change) { return in(batched_loop(F32, 3, 2, 11, 4, false), i, change); };
  auto nested = [&](size_t i, auto change) { return in(nested_loops(11, 4), i, change); };
  auto indexed = [&](size_t i, auto change) {
    return in(segments(Reduction::kSum, F32, I32, 10, 4, 3, OutOfRange::kClip), i, change);
  };
  std::string why;
  for (const Program& p : {batched_loop(F32, 3, 2, 11, 4, false), nested_loops(11, 4), row_products(F32, 5, 2),
                           segments(Reduction::kSum, F32, I32, 10, 4, 3, OutOfRange::kClip)})
    CHECK(!rejected(encode(p), &why), "%s", why.c_str());
  expect(batched(1, [](Program&, Instruction& i) { std::get<Loop>(i).count = 4; }), "source reads element 949 of input 1");
  expect(batched(1, [](Program&, Instruction& i) { std::get<Loop>(i).count = 0; }), "count is 0");
  expect(batched(1, [](Program&, Instruction& i) { std::get<Loop>(i).within = Within{0, 1, 1, 0, 0, 0, 1}; }), "within is 0");
  expect(batched(1, [](Program&, Instruction& i) { std::get<Loop>(i).within = Within{1, 1, 1, 0, 0, 3, 1}; }), "within is 3");
  expect(batched(1, [](Program&, Instruction& i) { std::get<Loop>(i).within = Within{1, 1, 2, 0, 0, 0, kMaxCount}; }),
         "within is ");
  expect(batched(1, [](Program& p, Instruction&) { p.preps[0].source.batch_strides[1] = 1; }), "source reads element 855");
  expect(batched(1, [](Program& p, Instruction&) { p.preps[0].source.batch_strides.pop_back(); }), "1 strides for 2 batch axes");
  expect(batched(1, [](Program& p, Instruction&) { p.batch_axes = 1; }), "2 strides for 1 batch axes");
  expect(batched(1, [](Program& p, Instruction&) { p.batch_axes = 4; }), "batch_axes is 4");
  expect(batched(1, [](Program& p, Instruction&) { p.preps[0].local = false; }), "depends on the batch");
  expect(batched(2, [](Program&, Instruction& i) { i = StridedLoad{}; }), "axis strides for");
  expect(batched(3, [](Program& p, Instruction& i) { std::swap(i, p.stages[0].body[2]); }),
         "prepared operand 0 is not packed before");
  expect(batched(4, [](Program&, Instruction& i) { std::get<Vector>(i).code[2].a = -2; }), "loop dimension is -2, not in -1..1");
  expect(batched(5, [](Program&, Instruction& i) { std::get<Vector>(i).stores[0].ref.batch_strides[1] = 0; }),
         "writes every batch to the same place");
  expect(batched(5, [](Program&, Instruction& i) { std::get<Vector>(i).stores[0].ref.loop_strides = {1}; }),
         "has strides for 1 loops, inside of 0");
  expect(nested(4, [](Program&, Instruction& i) { std::get<Vector>(i).stores[0].row_stride = 1; }), "where there are no rows");
  expect(nested(4, [](Program&, Instruction& i) { i = Accumulate{0, {}, {}, {}}; }), "stands where there are no rows");
  expect(nested(4, [](Program&, Instruction& i) { i = Stationary{0}; }), "stands in another one");
  expect(nested(8, [](Program&, Instruction& i) { std::get<Vector>(i).stores[0].ref.loop_strides = {3}; }),
         "writes element 90 of output");
  expect(nested(0, [](Program&, Instruction& i) { std::get<Loop>(i).count = int64_t{1} << 47; }), "runs more than 2**48 times");
  expect(indexed(0, [](Program&, Instruction& i) { std::get<AccumulateAt>(i).count = 4; }), "are not those of a sink of 63");
  expect(indexed(0, [](Program&, Instruction& i) { std::get<AccumulateAt>(i).index.ref = {Space::kIn, 0, 0, F32}; }),
         "an index cannot be float32");
  expect(indexed(1, [](Program&, Instruction& i) { std::get<Gather>(i).count = 4; }),
         "table reads element 69 of input 2, which has 63");
  expect(indexed(1, [](Program&, Instruction& i) { std::get<Gather>(i).fill.clear(); }), "fill is one number");
  auto ordered = [&](auto change) {
    Program p = ordered_segments(Reduction::kSum, F32, 21, 4, 3, true, F32);
    change(p, std::get<AccumulateAt>(p.stages[0].body[2]));
    return p;
  };
  expect(ordered([](Program& p, AccumulateAt&) { p.order = 3; }), "order is 3");
  expect(ordered([](Program& p, AccumulateAt&) { p.order = 0; }), "the order is 399 of float32, not 21 of int32");
  expect(ordered([](Program& p, AccumulateAt&) { p.batch_axes = 1; }), "batch axes has no order");
  expect(ordered([](Program& p, AccumulateAt&) { p.order = -1; }), "x is read in the order of the stream");
  expect(ordered([](Program&, AccumulateAt& a) { a.x.ref.space = Space::kScratch; }), "it must be an input");
  expect(ordered([](Program&, AccumulateAt& a) { a.x.strides = {0}; }), "of a row of x are not dense");
  expect(ordered([](Program& p, AccumulateAt& a) { p.stages[0].body.push_back(AccumulateAt(a)); }), "is fed twice");
  expect(ordered([](Program& p, AccumulateAt&) {
           p.stages[0].body.insert(p.stages[0].body.begin() + 2, Loop{2, false, std::nullopt, 1});
         }),
         "is fed twice");
  auto online = [&](auto change) {
    Program p = online_sums(F32, 21, 4, 3, 2, 3, false);
    change(p, std::get<RunMax>(p.stages[0].body[3]), std::get<AccumulateScaled>(p.stages[0].body[4]));
    return p;
  };
  expect(online([](Program&, RunMax&, AccumulateScaled& a) { a.sorted = false; }), "by sorted indices, one for each row");
  expect(online([](Program&, RunMax&, AccumulateScaled& a) { a.x.row_stride = 0; }), "by sorted indices, one for each row");
  expect(online([](Program& p, RunMax&, AccumulateScaled&) { p.sinks[0].how = Reduction::kMax; }), "a scaled sum is of float32");
  expect(online([](Program&, RunMax&, AccumulateScaled& a) { a.heads = 4; }), "4 heads do not share out a row");
  expect(online([](Program&, RunMax&, AccumulateScaled& a) { a.heads = 7; }), "heads");
  expect(online([](Program&, RunMax&, AccumulateScaled& a) { a.top.ref.offset = int64_t{1} << 20; }), "top reads");
  expect(online([](Program&, RunMax&, AccumulateScaled& a) { a.top.ref.dtype = I32; }), "its tops are int32");
  expect(online([](Program&, RunMax& m, AccumulateScaled&) { m.out.ref.dtype = BF16; }), "makes bfloat16 of float32");
  expect(online([](Program&, RunMax& m, AccumulateScaled&) { m.out.row_stride = 1; }), "rows of out overlap");
  expect(online([](Program&, RunMax& m, AccumulateScaled&) { m.x.strides = {2}; }), "the elements of a row are not dense");
  expect(online([](Program&, RunMax& m, AccumulateScaled&) { m.index.ref.dtype = F32; }), "an index cannot be float32");
  expect(online([](Program& p, RunMax&, AccumulateScaled& a) { p.stages[0].body.push_back(AccumulateScaled(a)); }), "is fed twice");
  auto selects = [&](size_t which, auto change) { return in(selection(F32, 5, 2, 3, 6, 2, OutOfRange::kFill), which, change); };
  expect(selects(0, [](Program&, Instruction& i) { std::get<Take>(i).count = 4; }), "reads element");
  expect(selects(0, [](Program&, Instruction& i) { std::get<Take>(i).fill = {}; }), "fill is one number");
  expect(selects(0, [](Program&, Instruction& i) { std::get<Take>(i).x.strides[1] = 1; }), "is not dense along what is selected");
  expect(
      selects(0, [](Program&, Instruction& i) { std::get<Take>(i).index.row_stride = 1, std::get<Take>(i).index.strides = {0}; }),
      "depend on the row");
  expect(selects(1, [](Program&, Instruction& i) { std::get<Put>(i).count = 4; }), "writes element");
  expect(selects(1, [](Program&, Instruction& i) { std::get<Put>(i).inner = int64_t{1} << 31; }), "a dimension is too long");
  expect(in(row_products(F32, 5, 2), 0, [](Program&, Instruction& i) { std::get<Dot>(i).k = 10; }), "reads element");
  Program deep = nested_loops(11, 4);
  deep.stages[0].body.insert(deep.stages[0].body.begin(), 9, Loop{1, false, std::nullopt, 0});
  for (int64_t i = 0; i < 9; ++i) deep.stages[0].body[i] = Loop{1, false, std::nullopt, 17 - i};
  expect(deep, "loops are nested");
}

// Forged choices of how a product is multiplied.
void test_activations() {
  for (int kind = 0; kind < kNumActivations; ++kind) {
    const Activation act = Activation(kind);
    Program good = matmul(F32, 7, 1, Product::kBest, act);
    std::string why;
    CHECK(!rejected(encode(good), &why), "%s", why.c_str());
    auto parameters = [&](Program& p) -> std::vector<double>& { return std::get<Matmul>(p.stages[0].body[0]).parameters; };
    Program p = good;
    parameters(p).push_back(1);
    const std::string count = std::to_string(kActivationParameters[kind]);
    expect(p, ("its activation takes " + count + " parameters, not " + std::to_string(kActivationParameters[kind] + 1)).c_str());
    if (kActivationParameters[kind] > 0) {
      std::vector<double> wrong{0.0, 1e-40, 1e40, -1e40, static_cast<double>(INFINITY), static_cast<double>(NAN)};
      if (act != Activation::kScale) wrong.push_back(-1.0);
      for (double bad : wrong) {
        p = good;
        parameters(p).back() = bad;
        expect(p, "a parameter of its activation is not in 2**-100..2**100");
      }
      p = good;
      parameters(p).clear();
      expect(p, ("its activation takes " + count + " parameters, not 0").c_str());
    }
    p = matmul(F64, 7, 1, Product::kBest, act);
    if (act > Activation::kRelu) expect(p, "float64 sums have no such activation");
  }
  Program p = matmul(F32, 7, 1);
  std::get<Matmul>(p.stages[0].body[0]).adds = true;
  std::string why;
  CHECK(!rejected(encode(p), &why), "%s", why.c_str());
  for (DType t : {BF16, F64}) {
    p = matmul(t, 7, 1);
    std::get<Matmul>(p.stages[0].body[0]).adds = true;
    expect(p, "only a product whose result is float32 adds to what is in out");
  }
  p = matmul(F32, 7, 1);
  std::get<Matmul>(p.stages[0].body[0]).activation = Activation(kNumActivations);
  expect(p, "(Matmul.activation): 10 is not in 0..9");
}

void test_products() {
  for (Product product : {Product::kWidened, Product::kDots, Product::kTiles}) {
    Program p = matmul(BF16, 7, 1);
    p.preps[0].product = product;
    std::string why;
    CHECK(!rejected(encode(p), &why), "%s", why.c_str());
    p = matmul(F32, 7, 1);
    p.preps[0].product = product;
    expect(p, "which only bfloat16 can have, and this is float32");
    p = matmul(BF16, 7, 1);
    p.preps[1].product = product;
    expect(p, "a dense operand is no product");
    p = weight_gradient(F64, 7, 1);
    std::get<AccumulateMatmul>(p.stages[0].body[0]).product = product;
    expect(p, "which only bfloat16 can have, and this is float64");
  }
  Program p = matmul(BF16, 7, 1);
  p.preps[0].product = Product(kNumProducts);
  expect(p, "(Prep.product): 4 is not in 0..3");
  p = weight_gradient(BF16, 7, 1);
  std::get<AccumulateMatmul>(p.stages[0].body[0]).product = Product(-1);
  expect(p, "(AccumulateMatmul.product): -1 is not in 0..3");

  // The sums of a weight gradient lie as its shape says.
  p = weight_gradient(F32, 7, 1);
  auto other = std::get<AccumulateMatmul>(p.stages[0].body[0]);
  CHECK(other.m != other.n, "the test needs two shapes");
  std::swap(other.m, other.n);
  p.stages[0].body.push_back(other);
  expect(p, "is fed by products of other shapes");
}

// Sums of batches fill their output without meeting, and parts of sums lie inside of them.
void test_sums() {
  auto batches = [](auto change) {
    Program p = batch_sums(F32, 2, 3, 10, 4, 2);
    change(p);
    return p;
  };
  std::string why;
  CHECK(!rejected(encode(batches([](Program&) {})), &why), "%s", why.c_str());
  expect(batches([](Program& p) { p.sinks[0].batch_strides = {200}; }), "has 1 strides for 2 batch axes");
  expect(batches([](Program& p) { p.sinks[0].batch_strides = {200, 200}; }), "do not fill output 0, each a part of its own");
  expect(batches([](Program& p) { p.sinks[0].batch_strides = {0, 400}; }), "do not fill output 0, each a part of its own");
  expect(batches([](Program& p) { p.sinks[1].batch_strides = {-15, 5}; }), "batch stride is -15");
  expect(batches([](Program& p) { p.sinks[1].elements = 4; }), "do not fill output 1");
  expect(batches([](Program& p) { p.sinks[1].batch_strides = {}; }), "has 5 elements and output 1 has 30");
  expect(batches([](Program& p) {
           Operand index = operand(Space::kIn, 2, I32, 0, 0, {});
           p.inputs.push_back({I32, 1});
           p.sinks[1].how = Reduction::kSum;
           p.stages[0].body[1] = AccumulateAt{1, 5, {}, {}, index, operand(Space::kIn, 0, F32, 0, 0, {})};
         }),
         "sink 1 is one for each batch, and folds by indices");

  auto parts = [](size_t i, auto change) {
    Program p = sums_in_parts(F32, 2, 10, 4, 101, 32);
    change(p.stages[0].body[i]);
    return p;
  };
  auto product = [&](size_t i, auto change) { return parts(i, [&](Instruction& x) { change(std::get<AccumulateMatmul>(x)); }); };
  auto values = [&](auto change) { return parts(3, [&](Instruction& x) { change(std::get<Accumulate>(x)); }); };
  CHECK(!rejected(encode(parts(0, [](Instruction&) {})), &why), "%s", why.c_str());
  expect(product(1, [](AccumulateMatmul& m) { m.sums.loop_strides = {33 * 35}; }),
         "sums do not begin with a part of its sink's matrices");
  expect(product(1, [](AccumulateMatmul& m) { m.sums.loop_strides = {64 * 35}; }), "folds beyond the 3535 elements of its sink");
  expect(product(2, [](AccumulateMatmul& m) { m.sums.loop_strides = {16 * 35}; }),
         "sums do not begin with a part of its sink's matrices");
  expect(product(4, [](AccumulateMatmul& m) { m.sums.loop_strides = {1}; }), "strides for 1 loops, inside of 0");
  expect(product(4, [](AccumulateMatmul& m) { m.sums.offset += 1; }), "folds beyond the 3535 elements of its sink");
  expect(product(1, [](AccumulateMatmul& m) { m.sums.offset = -1; }), "sums offset is -1");
  expect(product(1, [](AccumulateMatmul& m) { m.sums.loop_strides = {-1}; }), "sums stride is -1");
  expect(product(1, [](AccumulateMatmul& m) { m.matrices = {101, 32}; }), "matrices has neither 0 nor 3 numbers");
  expect(product(1, [](AccumulateMatmul& m) { m.matrices = {101, 0, 35}; }), "matrices is 0, not in 1..101");
  expect(product(1, [](AccumulateMatmul& m) { m.matrices = {100, 32, 35}; }), "matrices of 3500 elements to a sink of 3535");
  expect(product(4, [](AccumulateMatmul& m) { m.matrices = {101, 16, 35}; }), "is fed by products of other shapes");
  expect(product(1, [](AccumulateMatmul& m) { m.m = 31; }), "a product of 31 x 35 is no part of its sink's matrices");
  expect(values([](Accumulate& a) { a.sum_strides = {101}; }), "sums has 1 strides, not 2");
  expect(values([](Accumulate& a) { a.sum_strides = {110, 1}; }), "folds beyond the 202 elements of its sink");
  expect(values([](Accumulate& a) { a.sums.loop_strides = {35}; }), "folds beyond the 202 elements of its sink");
}

// Sizes whose sums and products do not fit in 64 bits, or that nothing the program reads or writes is in proportion to.
void test_sizes() {
  Program p = residual_pipeline(13, 4, 2);
  for (int i = 0; i < 1 << 20; ++i) p.queues.push_back({0, {2}, int64_t{1} << 4, int64_t{1} << 40});
  expect(p, "the queues would take more than 2**64 bytes");
  p = residual_pipeline(13, 4, 2);
  p.queues.push_back({0, {2}, 1, int64_t{1} << 36});
  expect(p, "the queues would take 687194");
  p = residual_pipeline(13, 4, 2);
  p.stages[0].scratch_bytes = int64_t{1} << 39;
  expect(p, "the temporary memory of a thread would take 549755");

  // A batch of many weights, all of them the same ones: a table of their offsets, and panels for each.
  p = matmul(F32, 7, 1);
  p.preps[0].b_extents = {int64_t{1} << 25};
  p.preps[0].b_strides = {0};
  expect(p, "more than 2**24 indices");
  p = matmul(F32, 7, 1);
  p.preps[0].b_extents = {int64_t{1} << 23};
  p.preps[0].b_strides = {0};
  p.stages[0].body.clear();
  p.outputs.clear();
  expect(p, "the packed weights would take");
  p = matmul(F32, 7, 1);
  p.preps[1] = dense(2, F32, F32, {int64_t{1} << 34}, {0});
  p.stages[0].body.clear();
  p.outputs.clear();
  expect(p, "the packed weights would take");

  // Rows that take no memory: any number of them fits an array, but not 64 bits together with what is done for each.
  p = weight_gradient(F32, 7, 1);
  p.axes = {int64_t{1} << 47};
  p.tile_rows = int64_t{1} << 47;
  auto& product = std::get<AccumulateMatmul>(p.stages[0].body[0]);
  product.x.row_stride = product.y.row_stride = 0;
  product.row_multiple = 1;
  expect(p, "is walked over more than 2**48 elements");
  p = random_vector(3);
  p.axes = {int64_t{1} << 45};
  auto& vector = std::get<Vector>(p.stages[0].body[0]);
  for (auto* list : {&vector.loads, &vector.stores})
    for (Operand& o : *list) o.row_stride = 0;
  vector.extents.assign(vector.extents.size(), 1 << 6);
  expect(p, vector.extents.empty() ? "writes every row to the same place" : "is walked over more than 2**48 elements");
  p = random_reduction(2, true);
  p.axes = {int64_t{1} << 40};
  p.tile_rows = 1;
  std::get<Accumulate>(p.stages[0].body[0]).x.row_stride = 0;
  for (int i = 0; i < 300; ++i) p.stages.push_back({"idle", 0, {}});
  expect(p, "more than 2**48 tiles");

  p = program({5}, 5, {{F32, 5}}, {{F32, 1}}, {});
  p.stages[0].body = {Vector{{},
                             false,
                             {operand(Space::kIn, 0, F32, 0, 1, {})},
                             {operand(Space::kOut, 0, F32, 0, 0, {})},
                             {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_store, F32, 0, 0, 0)}}};
  expect(p, "store 0 writes every row to the same place");
}

// The address space that a rejected or an idle program leaves alone.
void test_small_words_make_small_programs() {
  Program p = matmul(F32, 7, 1);
  p.preps[0].b_extents = {int64_t{1} << 26};
  p.preps[0].b_strides = {0};
  p.stages[0].body.clear();
  p.outputs.clear();
  std::vector<int64_t> words = encode(p);
  struct rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  rejected(words);
  getrusage(RUSAGE_SELF, &after);
  long kilobytes = after.ru_maxrss - before.ru_maxrss;
  CHECK(kilobytes < 200 << 10, "%zu words cost %ld kB", words.size(), kilobytes);
}

void test_names() {
  Program p = residual_pipeline(13, 4, 2);
  for (const char* good : {"", "mlp (caf\xC3\xA9.py:3)", "\xE2\x82\xAC", "\xF0\x9F\xA6\x8A", "\xEF\xBF\xBF", "\xF4\x8F\xBF\xBF"}) {
    p.name = p.stages[1].name = good;
    CHECK(!rejected(encode(p)), "the name '%s' is rejected", good);
  }
  // A lone continuation, overlong forms, surrogates, beyond U+10FFFF, what is no lead, and an end in the middle.
  for (const char* bad : {"\x80", "\xC0\xAF", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80",
                          "\xF5\x80\x80\x80", "\xFF", "a\xC3", "\xE2\x82", "\xF0\x9F\xA6"}) {
    p = residual_pipeline(13, 4, 2);
    p.name = bad;
    expect(p, "the name is not UTF-8");
    p.name = "fine";
    p.stages[1].name = bad;
    expect(p, "the name is not UTF-8");
  }
  p.name.assign(1 << 17, 'x');
  expect(p, "a name of 131072 bytes is longer than 65536");
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu::test;
  section("small programs", test_small_words_make_small_programs);  // first: it looks at the most memory that was ever in use
  section("parts", test_parts);
  section("structure", test_structure);
  section("activations", test_activations);
  section("damage", test_damage);
  section("messages", test_messages);
  section("products", test_products);
  section("sums", test_sums);
  section("sizes", test_sizes);
  section("names", test_names);
  std::printf("validator: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
