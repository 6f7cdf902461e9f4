// The kernels of src/kernels/amx.h on the model of the tile instructions, with the vectors that every CPU has.
#define KITSUNE_ISA amx_model
#define KITSUNE_TILE_BASE generic
#include "amx_model_table.h"
