// The kernels of src/kernels/amx.h on the model of the tile instructions, with the vectors that CPUs with AMX have.
// Flags, on x86-64 only: those of isa_avx512bf16.cc
#if defined(__x86_64__)
#define KITSUNE_ISA amx_model_avx512
#define KITSUNE_TILE_BASE avx512bf16
#include "amx_model_table.h"
#endif
