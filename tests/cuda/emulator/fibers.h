// Switching between stacks: a few instructions on x86-64 and aarch64, ucontext elsewhere or with EMULATOR_UCONTEXT.
#pragma once

#include <stdint.h>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT
#endif

#ifdef EMULATOR_UCONTEXT

#include <ucontext.h>

namespace emulator {

struct Context {
  ucontext_t state;
};

inline void switch_context(Context* from, Context* to) { swapcontext(&from->state, &to->state); }

inline void prepare_context(Context* context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context->state);
  context->state.uc_stack.ss_sp = stack;
  context->state.uc_stack.ss_size = bytes;
  context->state.uc_link = nullptr;
  makecontext(&context->state, entry, 0);
}

}  // namespace emulator

#else

// Saves the registers that a called function must preserve, swaps the stack pointer, restores them. The floating-point
// control words are the same in every fiber and stay as they are.
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.hidden emulator_switch_stack
.globl emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
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
  ret
.size emulator_switch_stack, .-emulator_switch_stack
)");
#else
asm(R"(
.text
.p2align 4
.hidden emulator_switch_stack
.globl emulator_switch_stack
.type emulator_switch_stack, %function
emulator_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch_stack, .-emulator_switch_stack
)");
#endif

extern "C" void emulator_switch_stack(void** save, void* load);

namespace emulator {

struct Context {
  void* stack_pointer;
};

inline void switch_context(Context* from, Context* to) {
  emulator_switch_stack(&from->stack_pointer, to->stack_pointer);
}

inline void prepare_context(Context* context, char* stack, size_t bytes, void (*entry)()) {
  uintptr_t* top = (uintptr_t*)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
#if defined(__x86_64__)
  // The first switch pops six registers and returns into `entry`, which must find the stack as after a call.
  *--top = 0;
  *--top = (uintptr_t)entry;
  for (int i = 0; i < 6; ++i) *--top = 0;
#else
  for (int i = 0; i < 20; ++i) *--top = 0;
  top[11] = (uintptr_t)entry;  // x30, the link register
#endif
  context->stack_pointer = top;
}

}  // namespace emulator

#endif
