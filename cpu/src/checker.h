// The validator of one program: the parts that program_check.cc, check_operand.cc, check_instruction.cc and check_vector.cc define.
//
// All address arithmetic is in 128 bits over operands bounded by kMaxCount, so it cannot overflow.
#pragma once

#include <string>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu {

__extension__ typedef __int128 Wide;

template <class T>
std::string str(T v) {
  return std::to_string(v);
}

[[noreturn]] inline void reject(const std::string& where, const std::string& what) { throw ProgramError(where + ": " + what); }

class Checker {
 public:
  explicit Checker(Program& program) : p(program), written(program.outputs.size(), 0), sink_stage(program.sinks.size(), -1) {}
  void all();

 private:
  Program& p;
  std::vector<char> written;        // per output array
  std::vector<int64_t> sink_stage;  // the stage that folds into each sink, or -1
  std::string where;                // the stage and instruction at hand
  int64_t stage = 0;
  int64_t tile_rows = 0;        // rows of the largest tile
  std::vector<int64_t> counts;  // of the enclosing loops
  bool stationary = false;      // is this inside of Stationary?
  std::vector<char> packed;     // prepared operands that a Pack before this has prepared, in this stage

  // program_check.cc
  void arrays();
  void sink(const Sink& s) const;
  void preps();
  void queues();
  void prep(const Prep& x);
  // The instructions [begin, end) of the stage at hand.
  void body(size_t begin, size_t end);

  // check_operand.cc
  void bound(const std::string& what, int64_t v, int64_t low, int64_t high) const;
  // The product of extents.
  int64_t count(const std::string& what, const std::vector<int64_t>& extents) const;
  // The lowest and highest element that `offset + sum(i_d * strides_d)` names lie in the reference's memory.
  void reach(const std::string& what, const Ref& ref, const std::vector<int64_t>& extents, const std::vector<int64_t>& strides,
             const char* verb) const;
  // Elements of the memory a reference names, after checking that it exists and has the reference's type.
  int64_t capacity(const std::string& what, const Ref& ref) const;
  void access(const std::string& what, const Ref& ref, bool write);
  // An operand that loops over (rows * row_multiple, *extents).
  void operand(const std::string& what, const Operand& x, const std::vector<int64_t>& extents, bool write,
               int64_t row_multiple = 1);

  // check_instruction.cc
  void check(const StridedLoad& x) { copy(x, true); }
  void check(const StridedStore& x) { copy(x, false); }
  void check(const Matmul& x);
  void check(const Reduce& x);
  void check(const Scan& x);
  void check(const Accumulate& x);
  void check(const AccumulateMatmul& x);
  void check(const Gather& x);
  void check(const AccumulateAt& x);
  void check(const AccumulateScaled& x);
  void check(const AccumulateTaken& x);
  void check(const TakenDot& x);
  void check(const RunMax& x);
  void check(const Take& x);
  void check(const Put& x);
  void check(const Pack& x);
  void check(const Dot& x);
  void check(const Loop&) {}
  void check(const Stationary&) {}
  void tiles_only() const;
  void prepared(int64_t prep) const;
  void select(const Select& x, bool takes);
  void filled(const std::vector<double>& fill) const;
  void table(const char* what, const Operand& x, int64_t rows, const std::vector<int64_t>& row);
  void folds(const AccumulateAt& x);
  void rows_of(const AccumulateAt& x);
  void scaled(const AccumulateScaled& x);
  void indexed(const Operand& index, int64_t count, const std::vector<int64_t>& index_extents);
  void copy(const Copy& x, bool load);
  void activation(const Matmul& x, bool wide) const;
  void multiplied(Product product, DType t) const;
  std::vector<int64_t> loops(const std::vector<int64_t>& kept, const std::vector<int64_t>& reduced) const;
  void foldable(Reduction how, DType t) const;
  void fold_into(int64_t sink, Fold fed);
  void sums(const Sums& x, const std::vector<int64_t>& extents, const std::vector<int64_t>& strides, int64_t elements) const;

  // check_vector.cc
  void check(const Vector& x);
  void source(int64_t r, DType type, const std::vector<int>& types) const;
  void micro(const Vector& x, const Micro& m, std::vector<int>& types) const;
  void immediates(const Micro& m) const;
};

}  // namespace kitsune::cpu
