// Loads and stores of u16, u32, float, U2 and U4 (naturally aligned) in shared and global memory, and atomic additions there.
//
// Comes in: generic pointers into the named state space. Goes out: one instruction each. Invariant: none synchronises anything;
// all but ld_global keep their order with the synchronising functions of this folder (volatile, and a compiler barrier).
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

namespace detail {

// One overload for each type of the contract. ADDRESS and its constraint C are u32, "r" (shared) or u64, "l" (global).
#define KITSUNE_DEFINE_LOAD(function, QUALIFIERS, instruction, ADDRESS, C, ...)                                                    \
  KITSUNE_DEVICE void function(u8& v, ADDRESS a) {                                                                                 \
    u32 wide;                                                                                                                      \
    asm QUALIFIERS(instruction ".u8 %0, [%1];" : "=r"(wide) : C(a) : __VA_ARGS__);                                                 \
    v = static_cast<u8>(wide);                                                                                                     \
  }                                                                                                                                \
  KITSUNE_DEVICE void function(u16& v, ADDRESS a) { asm QUALIFIERS(instruction ".u16 %0, [%1];" : "=h"(v) : C(a) : __VA_ARGS__); } \
  KITSUNE_DEVICE void function(u32& v, ADDRESS a) { asm QUALIFIERS(instruction ".u32 %0, [%1];" : "=r"(v) : C(a) : __VA_ARGS__); } \
  KITSUNE_DEVICE void function(float& v, ADDRESS a) {                                                                              \
    asm QUALIFIERS(instruction ".f32 %0, [%1];" : "=f"(v) : C(a) : __VA_ARGS__);                                                   \
  }                                                                                                                                \
  KITSUNE_DEVICE void function(U2& v, ADDRESS a) {                                                                                 \
    asm QUALIFIERS(instruction ".v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : C(a) : __VA_ARGS__);                             \
  }                                                                                                                                \
  KITSUNE_DEVICE void function(U4& v, ADDRESS a) {                                                                                 \
    asm QUALIFIERS(instruction ".v4.u32 {%0, %1, %2, %3}, [%4];"                                                                   \
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                                                    \
                   : C(a)                                                                                                          \
                   : __VA_ARGS__);                                                                                                 \
  }

#define KITSUNE_DEFINE_STORE(function, instruction, ADDRESS, C)                                                              \
  KITSUNE_DEVICE void function(ADDRESS a, u8 v) {                                                                            \
    asm volatile(instruction ".u8 [%0], %1;" ::C(a), "r"(static_cast<u32>(v)) : "memory");                                   \
  }                                                                                                                          \
  KITSUNE_DEVICE void function(ADDRESS a, u16 v) { asm volatile(instruction ".u16 [%0], %1;" ::C(a), "h"(v) : "memory"); }   \
  KITSUNE_DEVICE void function(ADDRESS a, u32 v) { asm volatile(instruction ".u32 [%0], %1;" ::C(a), "r"(v) : "memory"); }   \
  KITSUNE_DEVICE void function(ADDRESS a, float v) { asm volatile(instruction ".f32 [%0], %1;" ::C(a), "f"(v) : "memory"); } \
  KITSUNE_DEVICE void function(ADDRESS a, U2 v) {                                                                            \
    asm volatile(instruction ".v2.u32 [%0], {%1, %2};" ::C(a), "r"(v.x), "r"(v.y) : "memory");                               \
  }                                                                                                                          \
  KITSUNE_DEVICE void function(ADDRESS a, U4 v) {                                                                            \
    asm volatile(instruction ".v4.u32 [%0], {%1, %2, %3, %4};" ::C(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");   \
  }

KITSUNE_DEFINE_LOAD(load_shared, volatile, "ld.shared", u32, "r", "memory")
KITSUNE_DEFINE_STORE(store_shared, "st.shared", u32, "r")
// Not volatile: nobody writes the data, so the compiler may move or merge the loads. In a kernel of several phases a later one
// reads what an earlier one has written, by pointers that are opaque behind the barrier; so no load moves in front of it.
#if KITSUNE_PHASES
KITSUNE_DEFINE_LOAD(load_global, , "ld.global", u64, "l")
#else
KITSUNE_DEFINE_LOAD(load_global, , "ld.global.nc", u64, "l")
#endif
// A strong read at gpu scope never comes from L1, which is not coherent between SMs; ld.global.cg gives the same SASS
// (LDG.STRONG.GPU) but is a weak read to the memory model ("PTX ISA, Memory Consistency Model, Operation types").
KITSUNE_DEFINE_LOAD(load_l2, volatile, "ld.relaxed.gpu.global", u64, "l", "memory")
KITSUNE_DEFINE_STORE(store_global, "st.global", u64, "l")
#if KITSUNE_SM == 900
KITSUNE_DEFINE_LOAD(load_cluster, volatile, "ld.shared::cluster", u32, "r", "memory")
KITSUNE_DEFINE_STORE(store_cluster, "st.shared::cluster", u32, "r")
#endif

#undef KITSUNE_DEFINE_LOAD
#undef KITSUNE_DEFINE_STORE

}  // namespace detail

template <class T>
KITSUNE_DEVICE T ld_shared(const T* p) {
  T v;
  detail::load_shared(v, shared_address(p));
  return v;
}
template <class T>
KITSUNE_DEVICE void st_shared(T* p, T v) {
  detail::store_shared(shared_address(p), v);
}

// Data that no one writes while the kernel runs: it may come from the non-coherent cache. In a kernel of several phases
// (KITSUNE_PHASES) data that no one writes in this phase.
template <class T>
KITSUNE_DEVICE T ld_global(const T* p) {
  T v;
  detail::load_global(v, global_address(p));
  return v;
}
// Data that another CTA writes while the kernel runs. The order comes from wait_ge or ld_acquire.
template <class T>
KITSUNE_DEVICE T ld_l2(const T* p) {
  T v;
  detail::load_l2(v, global_address(p));
  return v;
}
template <class T>
KITSUNE_DEVICE void st_global(T* p, T v) {
  detail::store_global(global_address(p), v);
}

// Atomic additions of floats to global memory, which the L2 carries out; nothing comes back. None is ordered before or after any
// other, so a sum of several has whatever rounding their order gives it. Each float is added on its own.
KITSUNE_DEVICE void red_add(float* p, float v) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global_address(p)), "f"(v) : "memory");
}
template <int N>
KITSUNE_DEVICE void red_add(float* p, const float (&v)[N]) {
  static_assert(N == 2 || N == 4);
#if KITSUNE_SM == 900  // "PTX ISA, red": vectors need sm_90
  if constexpr (N == 2)
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(global_address(p)), "f"(v[0]), "f"(v[1]) : "memory");
  else
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global_address(p)), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3])
                 : "memory");
#else
  KITSUNE_UNROLL
  for (int i = 0; i < N; ++i) red_add(p + i, v[i]);
#endif
}

// Atomic maxima and minima, likewise. They have the same result in whatever order they come.
#define KITSUNE_DEFINE_RED(function, T, instruction)                                                              \
  KITSUNE_DEVICE void function(T* p, T v) {                                                                       \
    asm volatile("red.relaxed.gpu.global." instruction " [%0], %1;" ::"l"(global_address(p)), "r"(v) : "memory"); \
  }
KITSUNE_DEFINE_RED(red_max, i32, "max.s32")
KITSUNE_DEFINE_RED(red_max, u32, "max.u32")
KITSUNE_DEFINE_RED(red_min, i32, "min.s32")
KITSUNE_DEFINE_RED(red_min, u32, "min.u32")
#undef KITSUNE_DEFINE_RED

// The same pointer, of which the compiler knows nothing any more. Loads of constants that a loop needs in every round would else be
// taken out of it, all into registers.
template <class T>
KITSUNE_DEVICE T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}
// The same for a number: a loop that runs up to a number that the compiler knows a bound of is unrolled by NVRTC 13.0 as often as
// that, whatever its pragma says (33 times for 32 tiles, 105 000 instructions).
KITSUNE_DEVICE u32 opaque(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

}  // namespace kitsune::arch
