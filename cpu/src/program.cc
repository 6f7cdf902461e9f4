// Words -> Call: header, checksum, and the fields in the order bytecode.py declares them. Meaning is checked in
// program_check.cc.
#include "kitsune_cpu/program.h"

#include <array>

#include "word_reader.h"

namespace kitsune::cpu {

// CRC-32 of words, as zlib's of their bytes in little-endian order.

namespace {

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}
constexpr auto kCrcTable = crc_table();

}  // namespace

uint32_t crc32(const int64_t* words, size_t count) {
  uint32_t c = 0xFFFFFFFFu;
  for (size_t i = 0; i < count; ++i) {
    uint64_t w = static_cast<uint64_t>(words[i]);
    for (int b = 0; b < 8; ++b, w >>= 8) c = kCrcTable[(c ^ w) & 0xFF] ^ (c >> 8);
  }
  return c ^ 0xFFFFFFFFu;
}

namespace {

Ref read_ref(Reader& r) {
  Ref x;
  x.space = static_cast<Space>(r.in_range("Ref.space", 0, 4));
  x.index = r.word("Ref.index");
  x.offset = r.word("Ref.offset");
  x.dtype = r.dtype("Ref.dtype");
  x.loop_strides = r.list("Ref.loop_strides");
  x.batch_strides = r.list("Ref.batch_strides");
  return x;
}

Operand read_operand(Reader& r) {
  Operand x;
  x.ref = read_ref(r);
  x.row_stride = r.word("Operand.row_stride");
  x.strides = r.list("Operand.strides");
  return x;
}

Gather read_gather(Reader& r) {
  Gather x;
  x.table = read_operand(r);
  x.count = r.word("Gather.count");
  x.mode = static_cast<OutOfRange>(r.in_range("Gather.mode", 0, 1));
  x.fill = r.many("Gather.fill", [&] { return r.real("Gather.fill"); });
  x.index_extents = r.list("Gather.index_extents");
  x.extents = r.list("Gather.extents");
  x.index = read_operand(r);
  x.out = read_operand(r);
  return x;
}

AccumulateAt read_accumulate_at(Reader& r) {
  AccumulateAt x;
  x.sink = r.word("AccumulateAt.sink");
  x.count = r.word("AccumulateAt.count");
  x.index_extents = r.list("AccumulateAt.index_extents");
  x.extents = r.list("AccumulateAt.extents");
  x.index = read_operand(r);
  x.x = read_operand(r);
  x.sorted = r.flag("AccumulateAt.sorted");
  x.ordered = r.flag("AccumulateAt.ordered");
  return x;
}

AccumulateScaled read_accumulate_scaled(Reader& r) {
  AccumulateScaled x{read_accumulate_at(r), read_operand(r)};
  x.heads = r.word("AccumulateScaled.heads");
  x.finite = r.flag("AccumulateScaled.finite");
  return x;
}

AccumulateTaken read_accumulate_taken(Reader& r) {
  AccumulateTaken x{read_accumulate_scaled(r), 0, OutOfRange::kClip, {}, {}, {}, 0};
  x.rows = r.word("AccumulateTaken.rows");
  x.mode = static_cast<OutOfRange>(r.in_range("AccumulateTaken.mode", 0, 1));
  x.fill = r.many("AccumulateTaken.fill", [&] { return r.real("AccumulateTaken.fill"); });
  x.taken = read_operand(r);
  x.factor = read_operand(r);
  x.factors = r.word("AccumulateTaken.factors");
  return x;
}

Rows read_rows(Reader& r) {
  Rows x;
  x.x = read_operand(r);
  x.rows = r.word("rows");
  x.mode = static_cast<OutOfRange>(r.in_range("mode", 0, 1));
  x.fill = r.many("fill", [&] { return r.real("fill"); });
  x.taken = read_operand(r);
  return x;
}

TakenDot read_taken_dot(Reader& r) {
  TakenDot x;
  x.heads = r.word("TakenDot.heads");
  x.inner = r.word("TakenDot.inner");
  x.x = read_rows(r), x.y = read_rows(r);
  x.out = read_operand(r);
  return x;
}

RunMax read_run_max(Reader& r) {
  return {r.word("RunMax.count"), r.list("RunMax.extents"), read_operand(r), read_operand(r), read_operand(r)};
}

void read_select(Reader& r, Select& x) {
  x.count = r.word("count");
  x.indices = r.word("indices");
  x.inner = r.word("inner");
  x.outer = r.list("outer");
  x.index = read_operand(r);
  x.x = read_operand(r);
  x.out = read_operand(r);
}

Take read_take(Reader& r) {
  Take x;
  read_select(r, x);
  x.mode = static_cast<OutOfRange>(r.in_range("Take.mode", 0, 1));
  x.fill = r.many("Take.fill", [&] { return r.real("Take.fill"); });
  return x;
}

Put read_put(Reader& r) {
  Put x;
  read_select(r, x);
  return x;
}

template <class T>
T read_copy(Reader& r) {
  T x;
  x.array = read_ref(r);
  x.axis_strides = r.list("axis_strides");
  x.extents = r.list("extents");
  x.array_strides = r.list("array_strides");
  x.tile = read_operand(r);
  return x;
}

Matmul read_matmul(Reader& r) {
  Matmul x;
  x.x = read_operand(r);
  x.row_multiple = r.word("Matmul.row_multiple");
  x.batch = r.word("Matmul.batch");
  x.weight = r.word("Matmul.weight");
  x.bias = r.word("Matmul.bias");
  x.activation = static_cast<Activation>(r.in_range("Matmul.activation", 0, kNumActivations - 1));
  x.out = read_operand(r);
  x.parameters = r.many("Matmul.parameters", [&] { return r.real("Matmul.parameters"); });
  x.adds = r.in_range("Matmul.adds", 0, 1) != 0;
  x.rounds = r.dtype("Matmul.rounds");
  return x;
}

Micro read_micro(Reader& r) {
  Micro x;
  x.op = static_cast<Opcode>(r.in_range("Micro.op", 0, static_cast<int64_t>(Opcode::kCount) - 1));
  x.type = r.dtype("Micro.type");
  x.dst = r.word("Micro.dst");
  x.a = r.word("Micro.a");
  x.b = r.word("Micro.b");
  x.c = r.word("Micro.c");
  x.d = r.word("Micro.d");
  x.from_type = static_cast<DType>(r.in_range("Micro.from_type", -1, kNumDTypes - 1));
  x.imm = r.many("Micro.imm", [&] { return r.real("Micro.imm"); });
  return x;
}

Vector read_vector(Reader& r) {
  Vector x;
  x.extents = r.list("Vector.extents");
  x.collapse_rows = r.flag("Vector.collapse_rows");
  x.loads = r.many("Vector.loads", [&] { return read_operand(r); });
  x.stores = r.many("Vector.stores", [&] { return read_operand(r); });
  x.code = r.many("Vector.code", [&] { return read_micro(r); });
  return x;
}

Reduce read_reduce(Reader& r) {
  Reduce x;
  x.how = static_cast<Reduction>(r.in_range("Reduce.how", 0, 8));
  x.kept = r.list("Reduce.kept");
  x.reduced = r.list("Reduce.reduced");
  x.x = read_operand(r);
  x.out = read_operand(r);
  return x;
}

ExpRows read_exp_rows(Reader& r) {
  ExpRows x;
  x.kept = r.list("ExpRows.kept");
  x.n = r.word("ExpRows.n");
  x.factor = r.real("ExpRows.factor");
  x.x = read_operand(r), x.shift = read_operand(r), x.out = read_operand(r);
  x.sums = r.many("ExpRows.sums", [&] { return read_operand(r); });
  return x;
}

Scan read_scan(Reader& r) {
  Scan x;
  x.how = static_cast<Cumulative>(r.in_range("Scan.how", 0, 4));
  x.reverse = r.flag("Scan.reverse");
  x.extents = r.list("Scan.extents");
  x.x = read_operand(r);
  x.out = read_operand(r);
  return x;
}

Sums read_sums(Reader& r) {
  Sums x;
  x.offset = r.word("Sums.offset");
  x.loop_strides = r.list("Sums.loop_strides");
  return x;
}

Accumulate read_accumulate(Reader& r) {
  Accumulate x;
  x.sink = r.word("Accumulate.sink");
  x.kept = r.list("Accumulate.kept");
  x.reduced = r.list("Accumulate.reduced");
  x.x = read_operand(r);
  x.sums = read_sums(r);
  x.sum_strides = r.list("Accumulate.sum_strides");
  x.only = r.flag("Accumulate.only");
  return x;
}

AccumulateMatmul read_accumulate_matmul(Reader& r) {
  AccumulateMatmul x;
  x.sink = r.word("AccumulateMatmul.sink");
  x.row_multiple = r.word("AccumulateMatmul.row_multiple");
  x.batch = r.word("AccumulateMatmul.batch");
  x.m = r.word("AccumulateMatmul.m");
  x.n = r.word("AccumulateMatmul.n");
  x.x = read_operand(r);
  x.y = read_operand(r);
  x.product = static_cast<Product>(r.in_range("AccumulateMatmul.product", 0, kNumProducts - 1));
  x.sums = read_sums(r);
  x.matrices = r.list("AccumulateMatmul.matrices");
  return x;
}

Dot read_dot(Reader& r) {
  Dot x;
  x.batch = r.word("Dot.batch");
  x.m = r.word("Dot.m");
  x.n = r.word("Dot.n");
  x.k = r.word("Dot.k");
  x.x = read_operand(r);
  x.y = read_operand(r);
  x.out = read_operand(r);
  return x;
}

std::optional<Within> read_within(Reader& r) {
  const size_t words = r.length("Loop.within");
  r.check("Loop.within", words == 0 || words == 7, "it has neither 0 nor 7 numbers");
  if (words == 0) return std::nullopt;
  Within x;
  for (int64_t* field : {&x.divisor, &x.extent, &x.step, &x.low, &x.high, &x.which, &x.together}) *field = r.word("Loop.within");
  return x;
}

// A list of instructions, whose loops have such lists in them, `depth` deep already.
void read_body(Reader& r, int depth, std::vector<Instruction>* out) {
  for (size_t left = r.length("body"); left > 0; --left) {
    const size_t at = out->size();
    auto nested = [&](auto x) {
      r.check("body", depth < 2 * kMaxLoops, "the instructions are nested too deeply");
      out->push_back(x);
      read_body(r, depth + 1, out);
      x.length = static_cast<int64_t>(out->size() - at - 1);
      (*out)[at] = x;
    };
    switch (r.in_range("instruction code", 1, static_cast<int64_t>(std::variant_size_v<Instruction>))) {
      case 1: out->push_back(read_copy<StridedLoad>(r)); break;
      case 2: out->push_back(read_copy<StridedStore>(r)); break;
      case 3: out->push_back(read_matmul(r)); break;
      case 4: out->push_back(read_vector(r)); break;
      case 5: out->push_back(read_reduce(r)); break;
      case 6: out->push_back(read_scan(r)); break;
      case 7: out->push_back(read_accumulate(r)); break;
      case 8: out->push_back(read_accumulate_matmul(r)); break;
      case 9: out->push_back(read_gather(r)); break;
      case 10: out->push_back(read_accumulate_at(r)); break;
      case 11: out->push_back(Pack{r.word("Pack.prep")}); break;
      case 12: out->push_back(read_dot(r)); break;
      case 13: {
        int64_t count = r.word("Loop.count");
        bool reverse = r.flag("Loop.reverse");
        nested(Loop{count, reverse, read_within(r), 0});
        break;
      }
      case 14: nested(Stationary{0}); break;
      case 15: out->push_back(read_take(r)); break;
      case 16: out->push_back(read_put(r)); break;
      case 17: out->push_back(read_run_max(r)); break;
      case 18: out->push_back(read_accumulate_scaled(r)); break;
      case 19: out->push_back(read_accumulate_taken(r)); break;
      case 20: out->push_back(read_taken_dot(r)); break;
      default: out->push_back(read_exp_rows(r));
    }
  }
}

Prep read_prep(Reader& r) {
  Prep x;
  x.kind = static_cast<PrepKind>(r.in_range("Prep.kind", 0, 1));
  x.source = read_ref(r);
  x.dtype = r.dtype("Prep.dtype");
  x.b_extents = r.list("Prep.b_extents");
  x.b_strides = r.list("Prep.b_strides");
  x.k_extents = r.list("Prep.k_extents");
  x.k_strides = r.list("Prep.k_strides");
  x.n_extents = r.list("Prep.n_extents");
  x.n_strides = r.list("Prep.n_strides");
  x.product = static_cast<Product>(r.in_range("Prep.product", 0, kNumProducts - 1));
  x.local = r.flag("Prep.local");
  return x;
}

Sink read_sink(Reader& r) {
  Sink x;
  x.how = static_cast<Reduction>(r.in_range("Sink.how", 0, 6));
  x.dtype = r.dtype("Sink.dtype");
  x.elements = r.word("Sink.elements");
  x.out = r.word("Sink.out");
  x.batch_strides = r.list("Sink.batch_strides");
  return x;
}

Ring read_ring(Reader& r) {
  Ring x;
  x.producer = r.word("Ring.producer");
  x.consumers = r.list("Ring.consumers");
  x.depth = r.word("Ring.depth");
  x.entry_bytes = r.word("Ring.entry_bytes");
  return x;
}

Stage read_stage(Reader& r) {
  Stage x;
  x.name = r.text("Stage.name");
  x.scratch_bytes = r.word("Stage.scratch_bytes");
  read_body(r, 0, &x.body);
  return x;
}

Array read_array(Reader& r) {
  Array x;
  x.dtype = r.dtype("Array.dtype");
  x.elements = r.in_range("Array.elements", 0, kMaxCount);
  return x;
}

Program read_program(Reader& r) {
  Program p;
  p.name = r.text("Program.name");
  p.axes = r.list("Program.axes");
  p.batch_axes = r.word("Program.batch_axes");
  p.tile_rows = r.word("Program.tile_rows");
  p.workers = r.word("Program.workers");
  p.inputs = r.many("Program.inputs", [&] { return read_array(r); });
  p.outputs = r.many("Program.outputs", [&] { return read_array(r); });
  p.preps = r.many("Program.preps", [&] { return read_prep(r); });
  p.sinks = r.many("Program.sinks", [&] { return read_sink(r); });
  p.queues = r.many("Program.queues", [&] { return read_ring(r); });
  p.stages = r.many("Program.stages", [&] { return read_stage(r); });
  p.order = r.word("Program.order");
  return p;
}

Part read_part(Reader& r) {
  Part x;
  x.phase = r.word("Part.phase");
  x.reads = r.list("Part.reads");
  x.writes = r.list("Part.writes");
  x.program = read_program(r);
  return x;
}

}  // namespace

// Well-formed as the Unicode Standard has it (table 3-7): no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    auto byte = [&](size_t k) { return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u; };
    unsigned lead = byte(0);
    size_t more = lead < 0x80                   ? 0
                  : lead >= 0xC2 && lead < 0xE0 ? 1
                  : (lead & 0xF0) == 0xE0       ? 2
                  : lead >= 0xF0 && lead < 0xF5 ? 3
                                                : 4;
    if (more == 4) return false;
    unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    for (size_t k = 1; k <= more; ++k, low = 0x80, high = 0xBF)
      if (byte(k) < low || byte(k) > high) return false;
    i += more + 1;
  }
  return true;
}

Reader open_words(const int64_t* words, size_t count) {
  if (words == nullptr || count < kHeaderWords)
    throw ProgramError("kitsune program: " + std::to_string(count) +
                       " words are fewer than the header's 4: the attribute was truncated");
  if (words[0] != kMagic)
    throw ProgramError("kitsune program: word 0 is not the magic number: this is not a program, or it was altered");
  if (words[1] != kFormatVersion)
    throw ProgramError("kitsune program: format version " + std::to_string(words[1]) + ", but this extension reads version " +
                       std::to_string(kFormatVersion) + ": kitsune_jax and its extension are of different builds");
  if (words[2] != static_cast<int64_t>(count))
    throw ProgramError("kitsune program: " + std::to_string(count) + " words where the header says " + std::to_string(words[2]) +
                       ": the attribute was truncated or altered");
  if (words[3] != static_cast<int64_t>(crc32(words + kHeaderWords, count - kHeaderWords)))
    throw ProgramError("kitsune program: checksum mismatch: the attribute was truncated or altered");
  return Reader(words + kHeaderWords, count - kHeaderWords);
}

Call parse(const int64_t* words, size_t count) {
  Reader r = open_words(words, count);
  Call c;
  c.name = r.text("Call.name");
  c.arrays = r.many("Call.arrays", [&] { return read_array(r); });
  c.operands = r.word("Call.operands");
  c.results = r.word("Call.results");
  c.parts = r.many("Call.parts", [&] { return read_part(r); });
  if (!r.at_end()) throw ProgramError("kitsune program: " + std::to_string(r.left()) + " words are left over after the last part");
  for (Part& part : c.parts) validate(part.program);
  validate(c);
  return c;
}

const char* dtype_name(DType t) {
  static constexpr const char* kNames[kNumDTypes] = {"bool",   "int8",   "int16",   "int32",    "int64",   "uint8",  "uint16",
                                                     "uint32", "uint64", "float16", "bfloat16", "float32", "float64"};
  return kNames[static_cast<int>(t)];
}

const char* opcode_name(Opcode op) {
#define KITSUNE_NAME(name, operands, gives_bool) #name,
  static constexpr const char* kNames[] = {KITSUNE_OPCODES(KITSUNE_NAME)};
#undef KITSUNE_NAME
  return kNames[static_cast<int>(op)];
}

const char* space_name(Space space) {
  static constexpr const char* kNames[] = {"input", "output", "scratch", "queue", "prepared operand"};
  return kNames[static_cast<int>(space)];
}

}  // namespace kitsune::cpu
