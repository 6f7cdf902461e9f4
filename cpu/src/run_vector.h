// Vector programs, compiled: what the planning half (plan_vector.cc, plan_strips.cc) hands to the running half (run_vector.cc).
#pragma once

#include "executor_internal.h"
#include "executor_memory.h"
#include "kitsune_cpu/strips.h"
#include "strip_rows.h"

namespace kitsune::cpu {

// Block by block.

// Where a value lives while a block is worked on.
enum class Place : int8_t {
  kBuffer,    // a temporary buffer
  kOperand,   // in the memory of a load (already dense and of the register's type) or of the store it ends in
  kConstant,  // a table filled when the program was compiled
};

struct VectorOp {
  enum Kind : int8_t { kLoad, kStore, kIndex, kCompute } kind;
  DType type;
  Place place = Place::kBuffer;
  bool once = false;                       // a load that is the same for every block: filled before the first one
  bool streams = false;                    // a load whose next block lies behind, in memory (Compile::streams)
  bool single = false;                     // a constant that all of its readers take as one number: its table has one element
  int32_t a = -1, b = -1, c = -1, d = -1;  // values (defining operations)
  int32_t buffer = -1;
  int32_t operand = -1;  // of `at`: loads first, then stores
  VectorFn fn = nullptr;
  Opcode opcode{};  // of a computation by opcode, with the type of its operands
  DType operand_type = DType::kF32;
  Loader load;
  Storer store;
  double imm[2] = {0, 0};
  int64_t index_dim = 0, divisor = 1, modulus = 1;
};

// A store of a Vector that is no store: what would be written there is added to a sink's accumulators, and nothing else reads it.
// Elements of the loops that the store has, from the innermost one on, go to the accumulators in turn: `period` of them.
struct SummedStore {
  int64_t store;
  SumsAddress sums;
  int64_t period;
};

// A load and a store of `x` may share memory.
bool may_overlap(const Vector& x, int load, int store, const Compile& c);
// They name the same elements in the same order: an operation may read the one while it writes the other.
bool in_place(const Vector& x, int load, int store);

class VectorStep final : public Step {
 public:
  // `whole`: of tiles that have all their rows.
  VectorStep(const Vector& x, const Compile& c, bool whole);
  void run(const Context& c) const override;

 private:
  struct Frame;
  // Planning.
  void plan_loops(const Vector& x, const Compile& c, bool whole);
  void plan_values(const Vector& x, const Compile& c);
  VectorOp make_op(const Vector& x, const Micro& m, std::vector<int32_t>& defined, const Compile& c);
  void use_numbers(const Compile& c);
  void elide_stores(const Vector& x, const Compile& c);
  void elide_loads(const Vector& x, const Compile& c);
  void find_invariant_loads(const Vector& x, const Compile& c);
  void assign_buffers();
  bool dense(int operand) const;
  // Running.
  void block(const Frame& f, int64_t i, int64_t j, int64_t m, int64_t n) const;
  void load(const VectorOp& op, char* to, const char* from, int64_t m, int64_t n, char* spare) const;
  void store(const VectorOp& op, char* to, const char* from, int64_t m, int64_t n, char* spare) const;
  void fill_index(const Frame& f, const VectorOp& op, char* to, int64_t i, int64_t j, int64_t m, int64_t n) const;

  Nest nest_;
  int outer_ = 0;  // dimensions walked outside blocks; then the block's rows (if `rows_per_block_` > 0) and its columns
  int64_t rows_per_block_ = 0;  // 0: blocks are pieces of the innermost dimension alone
  int64_t chunk_ = 0;
  int loads_ = 0, operands_ = 0;
  size_t item_ = 1;  // largest element of any register
  std::vector<Address> addresses_;
  std::vector<int64_t> item_sizes_;
  std::vector<DType> storage_;
  std::vector<VectorOp> ops_;
  std::vector<int32_t> last_use_;
  std::vector<Block> constants_;
  std::vector<const void*> initial_;  // per value: its constant table, or nullptr
  int buffers_ = 0;
};

// Strip by strip.

// Where operands of instructions are: slots [0, constants), then buffers of the worker, then one for each load and store, which is
// the strip at hand in the operand's memory, or a buffer where that is not dense, or not of the register's type.
struct StripOperand {
  Address address;
  int64_t item = 0;  // bytes
  bool used = false;
  bool direct = false;   // instructions may work in the operand's memory
  bool number = false;   // a load of one number along the innermost loop
  bool spread = false;   // of such a number: somebody reads it as a whole strip
  bool streams = false;  // the next strips come from memory (Compile::streams)
  RowsOperand rows;      // in strips of short rows
  DType type{};          // of the register; kU16: the bits of 16-bit numbers, which instructions convert
  int32_t slot = 0;
  Loader load{};
  Storer store{};
};

struct StripIndex {
  DType type;
  int32_t slot;
  int dim;      // of the nest; -1: it does not move inside the Vector
  int64_t tag;  // Micro.a: 0 counts from the stream's first row, negative ones are loops around
  int64_t divisor, modulus;
};

// A SummedStore, planned. Where strips would lie across the end of its accumulators, sums of the tile have `lanes` accumulators of
// their own, which are added to the `period` of the sink behind it.
struct StripSum {
  SumsAddress sums;
  int64_t period, lanes;
  bool direct;          // there are none of its own
  int64_t step;         // accumulators from a strip to the next: below `lanes`
  int32_t slot, place;  // of the accumulators, and of a SumPlace
};

struct StripPlan {
  Nest nest;         // the last dimension is cut into strips
  int64_t step = 0;  // elements of each
  int64_t row = 1;   // elements of the short rows that they are made of
  std::vector<StripOperand> loads, stores;
  std::vector<StripIndex> indices;
  std::vector<StripSum> sums;
  std::vector<StripInstruction> code;
  std::vector<Block> constants;
  std::vector<std::shared_ptr<const float>> tables;
  int32_t buffers = 0;
  const StripKernels* kernels = nullptr;
};

// The plan of `x`, or nothing where it has operations that strips do not have, or loops too short for them. `whole`: of tiles that
// have all their rows. `summed`: of its stores; nothing where one of them can't be.
std::optional<StripPlan> plan_strips(const Vector& x, const Compile& c, bool whole, const std::vector<SummedStore>& summed = {});

std::unique_ptr<const Step> run_strips(StripPlan plan);

// The step of a Vector that only moves elements from where they lie side by side along one loop to where they do along another;
// nullptr for any other (run_copy.cc).
std::unique_ptr<const Step> transposition(const Vector& x, const Compile& c);

}  // namespace kitsune::cpu
