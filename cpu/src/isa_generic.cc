// The kernels for any CPU: the compiler's baseline (SSE2 on x86-64, NEON on AArch64), through 16-byte vector extensions.
// On x86-64 it runs on CPUs older than AVX2 only, of before 2013, and is compiled in a third of the time: its vectors are explicit.
// Flags, on x86-64 only: -O1
#define KITSUNE_ISA generic
#define KITSUNE_ISA_NAME "generic"
#include "kernels/table.h"
