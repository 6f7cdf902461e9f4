// The types of the arch contract, shared by the device implementation (arch.h beside this file) and the emulator.
//
// Comes in: nothing. Goes out: integers of a fixed width, the objects that live in shared memory, the tags of matmul operands, the
// registers of a launch.
// Invariant: layouts are equal on the host and the device, and no header is included (NVRTC has none).
#pragma once

namespace kitsune::arch {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(16) U4 {
  u32 x, y, z, w;
};
struct alignas(8) U2 {
  u32 x, y;
};

// An mbarrier object. It lives in shared memory, and only the mbar_* functions touch it.
struct Mbar {
  u64 bits;
};

// A CUtensorMap: 128 opaque bytes that the driver encodes, aligned as CUDA 13 declares it (before, 64 were enough).
struct alignas(128) TensorMap {
  u64 opaque[16];
};

// Operand types of a matmul. Accumulators are always float.
struct Bf16 {};
struct F16 {};
struct Tf32 {};

// Registers of a thread at the launch of a kernel that is declared for `Threads` threads, one CTA an SM, and uses setmaxnreg: ptxas
// takes the even share of the SM's 65 536, in steps of 8, whatever the code needs (read from cubins of NVRTC 13.0 and 13.5;
// tests/cuda/test_registers.py checks it). Times `Threads`, this is what setmaxnreg can hand around: 384 threads get 64 512.
template <u32 Threads>
constexpr u32 kLaunchRegisters = 65536 / Threads < 255 ? 65536 / Threads / 8 * 8 : 255;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(U4) == 16 && sizeof(U2) == 8);
static_assert(sizeof(Mbar) == 8 && sizeof(TensorMap) == 128);

}  // namespace kitsune::arch
