// The kernel table of this translation unit's ISA. Include once per unit, after defining KITSUNE_ISA and KITSUNE_ISA_NAME.
#pragma once

#include "constant_ops.h"
#include "dot_rows.h"
#include "dots.h"
#include "exp_rows.h"
#include "fold.h"
#include "gemm.h"
#include "outer.h"
#include "read_indices.h"
#include "rows.h"
#include "scaled_rows.h"
#include "short_rows.h"
#include "strip_table.h"
#include "transpose.h"

namespace kitsune::cpu::KITSUNE_ISA {

const StripKernels strip_kernels = {
    kStripVectors * kFloats,       &strips::instruction,       &strips::conversion, &strips::special,
    &strips::division_by_constant, &strips::table_instruction, &strips::run,
};

constexpr KernelTable kTable = {
    KITSUNE_ISA_NAME,
    &panel_for,
    &packed_bytes,
    &panel_count,
    &pack,
    &gemm_scratch_bytes,
    &gemm,
    &vector_function,
    &constant_function,
    &convert_function,
    &load_function,
    &store_function,
    &fold_function,
    &fold_row_function,
    &fold_short_function,
    &outer_scratch_bytes,
    &outer,
    &gather_rows,
    &scatter_rows,
    &transpose_function,
    &fold_runs_function,
    &fold_narrow_function,
    &fold_scaled_function,
    &dot_rows_function,
    &read_indices_function,
    &fold_table_function,
    &take_function,
    &dot_function,
    &exp_row_function,
    &strip_kernels,
    nullptr,
};

const KernelTable& table();
const KernelTable& table() { return kTable; }

}  // namespace kitsune::cpu::KITSUNE_ISA
