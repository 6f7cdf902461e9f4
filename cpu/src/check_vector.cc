// Vector programs: registers have a value of the right type before they are read.
#include <cmath>

#include "checker.h"

namespace kitsune::cpu {

void Checker::check(const Vector& x) {
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

void Checker::source(int64_t r, DType type, const std::vector<int>& types) const {
  bound("register", r, 0, kMaxRegisters - 1);
  if (types[r] < 0) reject(where, "register " + str(r) + " has no value yet");
  if (types[r] != static_cast<int>(type))
    reject(where, "register " + str(r) + " is " + dtype_name(static_cast<DType>(types[r])) + ", not " + dtype_name(type));
}

// How many of the numbers a to d an operation reads.
static int numbers_of(Opcode op) {
  switch (op) {
    case Opcode::op_const: return 0;
    case Opcode::op_load:
    case Opcode::op_convert: return 1;
    case Opcode::op_store: return 2;
    case Opcode::op_index: return 3;
    default: return operands_of(op);
  }
}

void Checker::micro(const Vector& x, const Micro& m, std::vector<int>& types) const {
  const int64_t numbers[] = {m.a, m.b, m.c, m.d};
  for (int i = numbers_of(m.op); i < 4; ++i)
    if (numbers[i] != 0) reject(where, "operand " + str(i) + ", which it has not, is " + str(numbers[i]) + " instead of 0");
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
    bound("loop dimension", m.a, -static_cast<int64_t>(counts.size()), static_cast<int64_t>(x.extents.size()));
    bound("divisor", m.b, 1, kMaxCount);
    bound("modulus", m.c, 1, kMaxCount);
    if (m.type == DType::kBool) reject(where, "an index cannot be bool");
  } else {
    const bool bits = m.op == Opcode::op_bitcast;
    auto number = [&](DType t) { return static_cast<int>(t) > static_cast<int>(DType::kBool) && !half(t); };
    if (bits && (!number(m.from_type) || !number(m.type) || item_size(m.from_type) != item_size(m.type)))
      reject(where, "the bits of its operand are not those of a " + std::string(dtype_name(m.type)));
    source(m.a, bits ? m.from_type : m.op == Opcode::op_select ? DType::kBool : m.type, types);
    if (operands_of(m.op) > 1) source(m.b, m.type, types);
    if (operands_of(m.op) > 2) source(m.c, m.type, types);
    if (operands_of(m.op) > 3) source(m.d, m.type, types);
    if (gives_bool(m.op)) result = DType::kBool;
    immediates(m);
  }
  types[m.dst] = static_cast<int>(result);
}

void Checker::immediates(const Micro& m) const {
  auto whole = [&](size_t i, double low, double high) {
    double v = m.imm[i];
    if (!(v >= low && v <= high) || v != std::floor(v)) reject(where, "parameter " + str(i) + " is out of range");
  };
  size_t want = m.op == Opcode::op_integer_pow ? 1 : m.op == Opcode::op_reduce_precision ? 2 : m.imm.size();
  if (m.imm.size() != want) reject(where, "it takes " + str(want) + " parameters, not " + str(m.imm.size()));
  if (m.op == Opcode::op_integer_pow) whole(0, -2147483648.0, 2147483647.0);
  if (m.op == Opcode::op_reduce_precision) whole(0, 1, 11), whole(1, 0, 52);
}

}  // namespace kitsune::cpu
