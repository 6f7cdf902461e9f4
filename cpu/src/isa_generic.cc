// The kernels for any CPU: the compiler's baseline (SSE2 on x86-64, NEON on AArch64), through 16-byte vector extensions.
// Flags: none beyond the common ones.
#define KITSUNE_ISA generic
#define KITSUNE_ISA_NAME "generic"
#include "kernels/table.h"
