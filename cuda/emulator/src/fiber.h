// Fibers: stacks that one OS thread switches between.
//
// Comes in: a stack and an entry function that never returns. Goes out: control, at fiber_switch. Invariant: a switch keeps what
// the calling convention says a call keeps, no more (no signal mask, no floating-point environment).
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace kitsune::emulator {

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

void fiber_prepare(Fiber& fiber, char* stack, size_t bytes, void (*entry)());
void fiber_switch(Fiber& from, Fiber& to);

// Stacks of `count` fibers, kept between launches. Only touched pages take memory.
char* fiber_stacks(size_t count, size_t bytes);
bool fiber_overflowed(const char* stack);

}  // namespace kitsune::emulator
