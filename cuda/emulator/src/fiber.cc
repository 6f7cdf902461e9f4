// Switching stacks (see fiber.h).

#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__x86_64__)
// Saves the callee-saved registers of the System V ABI on the old stack and takes them from the new one. It ends in pop and jump,
// not in ret: the return stack buffer would mispredict every switch.
extern "C" void kitsune_fiber_switch(void** save, void* load);
asm(R"(
.text
.globl kitsune_fiber_switch
.hidden kitsune_fiber_switch
.type kitsune_fiber_switch,@function
kitsune_fiber_switch:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size kitsune_fiber_switch,.-kitsune_fiber_switch
)");
#endif

namespace kitsune::emulator {

namespace {
constexpr uint64_t kCanary = 0x6b697473756e6521;  // at the far end of a stack
}

#if defined(__x86_64__)

void fiber_prepare(Fiber& fiber, char* stack, size_t bytes, void (*entry)()) {
  memcpy(stack, &kCanary, sizeof kCanary);
  auto* top = reinterpret_cast<uintptr_t*>(stack + bytes);
  *--top = 0;  // where entry would return to; leaves the stack pointer 8 off a multiple of 16, as a call does
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fiber.stack_pointer = top;
}

void fiber_switch(Fiber& from, Fiber& to) { kitsune_fiber_switch(&from.stack_pointer, to.stack_pointer); }

#else

void fiber_prepare(Fiber& fiber, char* stack, size_t bytes, void (*entry)()) {
  memcpy(stack, &kCanary, sizeof kCanary);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack + sizeof kCanary;
  fiber.context.uc_stack.ss_size = bytes - sizeof kCanary;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

void fiber_switch(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

#endif

char* fiber_stacks(size_t count, size_t bytes) {
  static char* stacks = nullptr;
  static size_t mapped = 0;
  if (mapped < count * bytes) {
    if (stacks) munmap(stacks, mapped);
    mapped = count * bytes;
    void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      stacks = nullptr;
      mapped = 0;
      throw std::bad_alloc();
    }
    stacks = static_cast<char*>(p);
  }
  return stacks;
}

bool fiber_overflowed(const char* stack) { return memcmp(stack, &kCanary, sizeof kCanary) != 0; }

}  // namespace kitsune::emulator
