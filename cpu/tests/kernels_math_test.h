// Floats: every elementary function against long double over sweeps of all exponents; special values; the rare special functions.
#pragma once

namespace kitsune::cpu::test {
void test_elementary();
void test_special_values();
void test_special_functions();
}  // namespace kitsune::cpu::test
