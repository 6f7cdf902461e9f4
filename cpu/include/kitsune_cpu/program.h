// The CPU program of a call as data, and the parser that makes it from the int64 words of the custom call's attribute.
//
// Comes in: the words that kitsune_jax/targets/cpu/bytecode.py encodes (that file is the format and says what every field means).
// Goes out: a Call. Invariant: a Call that `parse` returned reaches nothing outside its arrays, scratch, queues and prepared
// operands, for every row and every index; its stages can always make progress; a program reads operands and what programs of
// earlier phases wrote, and every other array is written by one program. No words, however damaged, crash the parser.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "kitsune_cpu/kernels.h"
#include "kitsune_cpu/opcodes.h"

namespace kitsune::cpu {

constexpr int64_t kMagic = 0x004B495453554E45;
constexpr int64_t kFormatVersion = 16;
constexpr int kHeaderWords = 4;
constexpr int kMaxRegisters = 32;
constexpr int kMaxLoopDims = 8;
constexpr int kMaxLoops = 8;  // nested
constexpr int64_t kMaxWorkers = int64_t{1} << 16;
constexpr int64_t kMaxPhases = int64_t{1} << 20;
constexpr int64_t kMaxCount = int64_t{1} << 48;          // elements, bytes, rows, |strides| and |offsets|
constexpr int64_t kMaxWeightIndices = int64_t{1} << 24;  // sums of the sides of all weights: each has a table of offsets

enum class Space : int8_t { kIn, kOut, kScratch, kQueue, kPrep };
enum class Reduction : int8_t { kSum, kMax, kMin, kProd, kAnd, kOr, kXor, kArgMax, kArgMin };
enum class Cumulative : int8_t { kSum, kProd, kMax, kMin, kLogSumExp };
enum class PrepKind : int8_t { kWeight, kDense };

struct Ref {
  Space space;
  int64_t index;
  int64_t offset;
  DType dtype;
  std::vector<int64_t> loop_strides = {};   // of the enclosing loops' numbers, outermost first; 0 beyond the end
  std::vector<int64_t> batch_strides = {};  // of the batch axes' indices, or none
};

struct Operand {
  Ref ref;
  int64_t row_stride;
  std::vector<int64_t> strides;
};

struct Copy {  // StridedLoad and StridedStore: the same fields, opposite directions
  Ref array;
  std::vector<int64_t> axis_strides;
  std::vector<int64_t> extents;
  std::vector<int64_t> array_strides;
  Operand tile;
};
struct StridedLoad : Copy {};
struct StridedStore : Copy {};

struct Matmul {
  Operand x;
  int64_t row_multiple;
  int64_t batch;
  int64_t weight;
  int64_t bias;
  Activation activation;
  Operand out;
  std::vector<double> parameters = {};  // of the activation
  bool adds = false;                    // to what is in `out`
  DType rounds = DType::kF32;           // as GemmArgs::rounds
};

struct Micro {
  Opcode op;
  DType type;
  int64_t dst, a, b, c, d;
  DType from_type;
  std::vector<double> imm;
};

struct Vector {
  std::vector<int64_t> extents;
  bool collapse_rows;
  std::vector<Operand> loads;
  std::vector<Operand> stores;
  std::vector<Micro> code;
};

struct Reduce {
  Reduction how;
  std::vector<int64_t> kept, reduced;
  Operand x, out;
};

// out(rows, *kept, n) = e^(x(rows, *kept, n) * factor - shift(rows, *kept)), of elements that lie dense; `sums`: nothing, or the
// place of their sums (rows, *kept).
struct ExpRows {
  std::vector<int64_t> kept;
  int64_t n;
  double factor;
  Operand x, shift, out;
  std::vector<Operand> sums;
};

struct Scan {
  Cumulative how;
  bool reverse;
  std::vector<int64_t> extents;
  Operand x, out;
};

// The part of a sink's accumulators that an instruction folds into: where it starts, by the numbers of the enclosing loops.
struct Sums {
  int64_t offset = 0;
  std::vector<int64_t> loop_strides = {};
};

struct Accumulate {
  int64_t sink;
  std::vector<int64_t> kept, reduced;
  Operand x;
  Sums sums = {};
  std::vector<int64_t> sum_strides = {};  // of the kept dimensions; none: the accumulators are dense
  bool only = false;                      // nothing else reads x, which the Vector in front may keep in registers then
};

struct AccumulateMatmul {
  int64_t sink;
  int64_t row_multiple;
  int64_t batch, m, n;
  Operand x, y;
  Product product = Product::kBest;
  Sums sums = {};
  std::vector<int64_t> matrices = {};  // none: m x n; else height, rows, columns of those that the sink has (Sink)
};

enum class OutOfRange : int8_t { kClip, kFill };

struct Gather {
  Operand table;  // strides of its rows, and of `extents`
  int64_t count;  // rows of the table
  OutOfRange mode;
  std::vector<double> fill;
  std::vector<int64_t> index_extents, extents;
  Operand index, out;
};

struct AccumulateAt {
  int64_t sink;
  int64_t count;  // rows of the sink
  std::vector<int64_t> index_extents, extents;
  Operand index, x;
  bool sorted = false;   // do the indices inside of the sink never decrease?
  bool ordered = false;  // is row r of x element order[r] of its array?
};

// A sum by sorted indices whose rows were scaled by e^-top: one `top` for each of the first extents, `heads` in all, the same for a
// tile's rows of one index. `finite`: an infinite or NaN top stands for 0; otherwise it makes the sum NaN.
struct AccumulateScaled : AccumulateAt {
  Operand top;
  int64_t heads = 1;
  bool finite = false;
};

// AccumulateScaled, or AccumulateAt where there are no heads, by sorted indices, of rows that are read where they lie in a table
// and multiplied: `x` is the table, `taken` names its rows.
struct AccumulateTaken : AccumulateScaled {
  int64_t rows;  // of the table
  OutOfRange mode;
  std::vector<double> fill;
  Operand taken, factor;
  int64_t factors;  // of a row, each for as many elements; 0: rows are added up as they are
};

// Rows of a tile, or (`rows` > 0) those that `taken` names of a table of so many.
struct Rows {
  Operand x;
  int64_t rows;
  OutOfRange mode;
  std::vector<double> fill;
  Operand taken;
};

// out(rows, h) = the sum of the products of elements [h inner, (h + 1) inner) of two rows, h < heads.
struct TakenDot {
  int64_t heads, inner;
  Rows x, y;
  Operand out;
};

// For each row of a tile the largest of x in the rows around it that have its index, element by element.
struct RunMax {
  int64_t count;  // indices are below it, or outside
  std::vector<int64_t> extents;
  Operand index, x, out;
};

// The elements of a dimension that stationary indices name, `inner` at a time. The last stride of x and out is that of the
// dimension or of the indices.
struct Select {
  int64_t count;  // the dimension's extent
  int64_t indices, inner;
  std::vector<int64_t> outer;
  Operand index, x, out;
};
struct Take : Select {
  OutOfRange mode = OutOfRange::kClip;
  std::vector<double> fill = {};
};
struct Put : Select {};

struct Pack {
  int64_t prep;
};

struct Dot {
  int64_t batch, m, n, k;
  Operand x, y, out;
};

// The iterations of a loop that a tile runs: number i stands for elements i * step to (i + 1) * step - 1, and it runs where those
// reach into [x + low, y + high], where x and y are the smallest and the largest index of the tile's rows on a stream axis, row /
// divisor % extent. Those of them whose elements all lie in [y + low, x + high] are whole, the others edges; whole are only all of
// `together` neighbours, counted from 0. An iteration that is not whole may leave out rows that see none of its elements.
struct Within {
  int64_t divisor, extent, step, low, high, which, together;  // which: 0 all of them, 1 the whole ones, 2 the edges
};

// The `length` instructions behind these are their body.
struct Loop {
  int64_t count;
  bool reverse;
  std::optional<Within> within;  // none: all iterations
  int64_t length;
};
struct Stationary {
  int64_t length;
};

// The position in the variant plus one is the instruction's CODE.
using Instruction =
    std::variant<StridedLoad, StridedStore, Matmul, Vector, Reduce, Scan, Accumulate, AccumulateMatmul, Gather, AccumulateAt, Pack,
                 Dot, Loop, Stationary, Take, Put, RunMax, AccumulateScaled, AccumulateTaken, TakenDot, ExpRows>;
constexpr const char* kInstructionNames[] = {"StridedLoad",
                                             "StridedStore",
                                             "Matmul",
                                             "Vector",
                                             "Reduce",
                                             "Scan",
                                             "Accumulate",
                                             "AccumulateMatmul",
                                             "Gather",
                                             "AccumulateAt",
                                             "Pack",
                                             "Dot",
                                             "Loop",
                                             "Stationary",
                                             "Take",
                                             "Put",
                                             "RunMax",
                                             "AccumulateScaled",
                                             "AccumulateTaken",
                                             "TakenDot",
                                             "ExpRows"};

struct Prep {
  PrepKind kind;
  Ref source;
  DType dtype;
  std::vector<int64_t> b_extents, b_strides, k_extents, k_strides, n_extents, n_strides;
  Product product = Product::kBest;
  bool local = false;  // prepared by Pack instructions, in memory of the worker
};

struct Array {
  DType dtype;
  int64_t elements;
};

// What folds into a sink: values, products, or rows at an index, which may be sorted.
enum class Fold : int8_t { kValues, kProducts, kRows, kSegments };

// A sink of the whole stream, or, with batch strides, one for each batch: `elements` of its output from the element on that the
// strides say.
struct Sink {
  Reduction how;
  DType dtype;
  int64_t elements;
  int64_t out;
  std::vector<int64_t> batch_strides = {};
  // Derived by the validator.
  Fold fed = Fold::kValues;
  // That indices name; or of the matrices of products, whose sums lie in groups of columns (kSumGroup): so many rows follow each
  // other in a group, of `height` that belong together. The last ones of those may be fewer.
  int64_t rows = 1, columns = 0, height = 0;
  bool per_batch() const { return !batch_strides.empty(); }
  int64_t heads = 0;  // of AccumulateScaled; 0 for other sinks
  bool finite = false;
};

struct Ring {
  int64_t producer;
  std::vector<int64_t> consumers;
  int64_t depth;
  int64_t entry_bytes;
};

struct Stage {
  std::string name;
  int64_t scratch_bytes;
  std::vector<Instruction> body;
};

struct Program {
  std::string name;
  std::vector<int64_t> axes;
  int64_t batch_axes = 0;
  int64_t tile_rows;
  int64_t workers = 1;  // threads that the plan counts on: what partial sums are kept for
  std::vector<Array> inputs, outputs;
  std::vector<Prep> preps;
  std::vector<Sink> sinks;
  std::vector<Ring> queues;
  std::vector<Stage> stages;
  int64_t order = -1;  // the input through which copies of streamed arrays go, or -1
  // Derived by the validator.
  int64_t rows = 0;
  int64_t batch_rows = 0;  // of one batch
  int64_t batch_tiles = 0;
  int64_t tiles = 0;
};

// A program on arrays of the call, given by number: `reads` are its inputs, `writes` its outputs.
struct Part {
  int64_t phase;
  std::vector<int64_t> reads, writes;
  Program program;
};

// Arrays: operands, then results, then those that live during the call only. A barrier stands between two phases.
struct Call {
  std::string name;
  std::vector<Array> arrays;
  int64_t operands = 0, results = 0;
  std::vector<Part> parts;
};

class ProgramError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Parses and validates; throws ProgramError with a sentence that names what is wrong (or std::bad_alloc).
Call parse(const int64_t* words, size_t count);

// The validator of a program and that of a whole call (parse calls both): fill the derived fields.
void validate(Program& program);
void validate(const Call& call);

const char* dtype_name(DType t);
const char* opcode_name(Opcode op);
const char* space_name(Space space);
inline bool is_float(DType t) { return t >= DType::kF16; }
// The type a value of a storage type has in a register: float16 and bfloat16 compute in float32.
inline DType compute_type(DType t) { return t == DType::kF16 || t == DType::kBF16 ? DType::kF32 : t; }
// The product of extents that the validator has bounded.
inline int64_t product(const std::vector<int64_t>& extents) {
  int64_t n = 1;
  for (int64_t e : extents) n *= e;
  return n;
}

uint32_t crc32(const int64_t* words, size_t count);  // zlib's CRC-32 of the words as little-endian bytes

}  // namespace kitsune::cpu
