// Runs a grid of blocks on one host thread: every lane of every resident block is a fiber.
//
// Lanes of a warp stand in a ring, in a random order. A lane runs until a collective of its warp (shuffle, product,
// barrier) and then hands over to the next one in the ring; the last one to arrive completes the collective and goes
// on at once. A collective thus costs 32 switches and nothing is ever searched. Results are exchanged through two
// alternating buffers: by the time a buffer is written again, every lane has arrived at the collective in between, so
// it has read what it wanted.
//
// Warps are preempted at barriers, at every primitive that other blocks can observe and now and then at collectives;
// the next warp is drawn at random. All randomness comes from the launch's seed.
#pragma once

#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "fibers.h"

// The emulator's own accesses to memory are not the kernel's: the race detector must not see them.
#define UNWATCHED __attribute__((no_sanitize("thread")))

namespace emulator {

constexpr uint32_t WARP = 32;
constexpr uint32_t MAX_WARPS_PER_BLOCK = 32;
constexpr uint32_t BARRIERS = 16;
constexpr size_t PAGE = 4096;
constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t SHARED_GUARD_BYTES = 1 << 20;
// With nothing stored anywhere, a poll that failed once fails for ever; the margin is for polls that look at several
// words in turn.
constexpr uint32_t FAILED_POLLS_PER_WARP = 256;

enum class Operation : uint8_t {
  none,
  warp_barrier,
  from_lane_above,
  from_lane_below,
  from_lane,
  from_lane_xor,
  any_lane,
  block_barrier,
  group_barrier,
  mma_bf16,
  mma_f16,
  load_matrices,
  load_matrices_transposed,
  wait_a_little,
  load_relaxed,
  store_relaxed,
  fetch_add,
  clear_bits,
  raise_to,
  load_acquire,
  store_release,
  load_fresh,
  add_to,
};

inline const char* name_of(Operation operation) {
  static const char* const names[] = {
      "nothing",     "warp_barrier",  "from_lane_above",  "from_lane_below",          "from_lane",     "from_lane_xor",
      "any_lane",
      "block_barrier", "group_barrier", "mma_bf16", "mma_f16", "load_matrices", "load_matrices_transposed",
      "wait_a_little", "load_relaxed", "store_relaxed", "fetch_add", "clear_bits", "raise_to", "load_acquire",
      "store_release", "load_fresh", "add_to"};
  static_assert(sizeof names / sizeof *names == (int)Operation::add_to + 1, "one name for each operation");
  return names[(int)operation];
}

// Where in the kernel's source a primitive was called. Compilers fill the defaults in at the call.
struct Site {
  Operation operation;
  uint32_t line;
  const char* file;
};

inline const char* base_name(const char* path) {
  if (!path) return "?";
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

struct Exchange {
  alignas(32) uint32_t words[WARP][12];
  alignas(32) float product[16][8];
};

struct Warp;
struct Block;

struct Lane {
  Context context;
  Lane* next;
  Warp* warp;
  uint32_t thread;
};

enum class State : uint8_t { ready, polling, at_barrier, done };

struct Warp {
  Lane lanes[WARP];
  Lane* resume;        // where to go on when the warp is scheduled
  Block* block;
  uint32_t index;      // within the block
  uint32_t arrived;    // lanes that wait in the collective that is gathering
  uint32_t finished;   // lanes that have returned from the kernel
  uint32_t phase;      // which exchange buffer the gathering collective uses
  uint64_t argument;   // what all lanes of the gathering collective must agree on
  Site gathering;
  Site observed;       // the last primitive that other blocks can observe
  State state;
  uint32_t runnable_slot;
  uint64_t poll_epoch;
  uint32_t failed_polls;
  char* stacks;
  Exchange exchange[2];
};

struct Barrier {
  uint32_t warps;    // mask of those that wait
  uint32_t threads;  // as the first one to arrive said
};

struct Block {
  uint32_t index;
  uint32_t warps;
  uint32_t alive;  // mask of warps that have not returned
  bool lazy;       // scheduled rarely
  bool live;
  Warp* warp[MAX_WARPS_PER_BLOCK];
  Barrier barriers[BARRIERS];
  char* mapping;
  char* shared;
};

struct PendingStore {
  char* address;
  uint32_t bytes;
  uint32_t block, thread;  // who stored it
  uint32_t met;            // mask of warps of that block that have met the thread at a barrier since
  char value[16];
};
constexpr uint32_t MAX_PENDING = 128;

struct Random {
  uint64_t state;
  UNWATCHED uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  UNWATCHED uint32_t below(uint32_t bound) { return (uint32_t)(((next() >> 32) * bound) >> 32); }
};

// Mirrored by the Python driver.
struct Range {
  const void* begin;
  uint64_t bytes;
};

struct LaunchOptions {
  void (*entry)(const void* params);
  const void* params;
  uint64_t seed;
  double cpu_seconds;
  uint32_t blocks, threads, shared_bytes, resident;
  uint32_t relaxed;
  uint32_t shared_flush_start;
  char** stacks;        // from emulator_new_stacks, one for each warp of the resident blocks
  const Range* ranges;  // of the buffers that races are looked for in
  uint32_t range_count;
};

struct LaunchReport {
  uint64_t collectives, switches_of_warps, failed_polls;
  uint64_t fault_address, fault_instruction, other_instruction;
  uint32_t faulted, fault_is_write;
  char message[8000];
};

// A plain struct without constructors: one instance per built module, only ever touched by the launching thread.
struct Machine {
  Lane* current;
  int64_t countdown;  // collectives until the next preemption
  Context main;
  bool running_fiber;
  bool failed;
  volatile sig_atomic_t out_of_time;
  Random random;
  uint32_t mean_burst;
  LaunchOptions options;
  LaunchReport* report;
  uint64_t epoch;  // advances whenever something happens that a poll could notice
  uint64_t stuck_epoch;
  uint32_t stuck_warps;
  Warp** runnable;
  uint32_t runnable_count;
  Warp* warps;
  size_t warps_bytes;
  Block* slots;
  uint32_t slot_count;
  size_t shared_mapping_bytes;
  PendingStore pending[MAX_PENDING];  // oldest first
  uint32_t pending_count;
  uint32_t mean_delay;
};

static Machine machine;

}  // namespace emulator

extern "C" __attribute__((visibility("default"))) int emulator_launch(const emulator::LaunchOptions* options,
                                                                     emulator::LaunchReport* report);

namespace emulator {

// races.h
UNWATCHED inline void watch_meeting(const Block* block, uint32_t warps);
UNWATCHED inline void watch_block_start(const Block* block);
UNWATCHED inline bool start_watching();
UNWATCHED inline void stop_watching();

// pending_stores.h
UNWATCHED inline void deliver_sometimes();
UNWATCHED inline void deliver_all();

// ---- errors

[[noreturn]] UNWATCHED inline void leave() {
  machine.failed = true;
  Context abandoned;
  machine.running_fiber = false;
  switch_context(&abandoned, &machine.main);
  __builtin_unreachable();
}

UNWATCHED inline void append(const char* format, ...) __attribute__((format(printf, 1, 2)));
UNWATCHED inline void append(const char* format, ...) {
  char* text = machine.report->message;
  size_t used = strlen(text), room = sizeof machine.report->message - used;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + used, room, format, arguments);
  va_end(arguments);
}

UNWATCHED inline void append_who(const Lane* lane) {
  append("block %u, warp %u, lane %u", lane->warp->block->index, lane->warp->index, lane->thread % WARP);
}

UNWATCHED inline void append_site(const Site& site) {
  append("%s (%s:%u)", name_of(site.operation), base_name(site.file), site.line);
}

// While one of these lives, the launch is not ended from outside: the C library may hold its locks.
struct Uninterrupted {
  bool was;
  UNWATCHED Uninterrupted() : was(machine.running_fiber) { machine.running_fiber = false; }
  UNWATCHED ~Uninterrupted() { machine.running_fiber = was; }
};

// ---- scheduling

UNWATCHED inline void switch_lane(Lane* from, Lane* to) {
  machine.current = to;
  switch_context(&from->context, &to->context);
}

UNWATCHED inline void add_runnable(Warp* warp) {
  warp->runnable_slot = machine.runnable_count;
  machine.runnable[machine.runnable_count++] = warp;
}

UNWATCHED inline void remove_runnable(Warp* warp) {
  Warp* last = machine.runnable[--machine.runnable_count];
  machine.runnable[warp->runnable_slot] = last;
  last->runnable_slot = warp->runnable_slot;
}

// Back to the scheduler; returns when the warp is drawn again.
UNWATCHED __attribute__((noinline)) inline void yield_warp() {
  Lane* me = machine.current;
  me->warp->resume = me;
  machine.running_fiber = false;
  switch_context(&me->context, &machine.main);
}

UNWATCHED inline void draw_burst() { machine.countdown = 1 + machine.random.below(2 * machine.mean_burst); }

UNWATCHED inline void preempt_sometimes(uint32_t weight) {
  machine.countdown -= weight;
  if (__builtin_expect(machine.countdown <= 0, 0)) {
    draw_burst();
    yield_warp();
  }
}

[[noreturn]] UNWATCHED __attribute__((noinline)) inline void fail_diverged(Lane* me, const Site& site, uint64_t argument) {
  Warp* warp = me->warp;
  append("divergence in a collective: ");
  append_who(me);
  append(" calls ");
  append_site(site);
  if (warp->finished) {
    append(" but %u lanes of its warp have returned from the kernel", warp->finished);
  } else if (warp->gathering.operation == site.operation && warp->gathering.line == site.line) {
    append(" with arguments (%llu) unlike those of the other lanes (%llu)", (unsigned long long)argument,
           (unsigned long long)warp->argument);
  } else {
    append(" while %u lanes of its warp wait in ", warp->arrived);
    append_site(warp->gathering);
  }
  leave();
}

// All lanes of the calling lane's warp meet here. Returns true in the lane that arrived last.
UNWATCHED inline bool rendezvous(Lane* me, Site site, uint64_t argument) {
  Warp* warp = me->warp;
  if (warp->arrived == 0) {
    warp->gathering = site;
    warp->argument = argument;
    if (__builtin_expect(warp->finished != 0, 0)) fail_diverged(me, site, argument);
  } else if (__builtin_expect(warp->gathering.operation != site.operation || warp->gathering.line != site.line ||
                                  warp->argument != argument, 0)) {
    fail_diverged(me, site, argument);
  }
  if (++warp->arrived == WARP) {
    warp->arrived = 0;
    warp->phase ^= 1;
    ++machine.report->collectives;
    return true;
  }
  switch_lane(me, me->next);
  return false;
}

// The buffer of the collective that the calling lane is about to enter; valid until its next collective.
UNWATCHED inline Exchange* exchange_of(Lane* me) { return &me->warp->exchange[me->warp->phase & 1]; }

// All threads of `warps` (a mask) of a block have met at a barrier.
UNWATCHED inline void note_meeting(const Block* block, uint32_t warps) {
  watch_meeting(block, warps);
  for (uint32_t i = 0; i < machine.pending_count; ++i) {
    PendingStore& store = machine.pending[i];
    if (store.block == block->index && ((store.met | 1u << store.thread / WARP) & warps)) store.met |= warps;
  }
}

UNWATCHED inline void release_barrier(Block* block, Barrier* barrier) {
  note_meeting(block, barrier->warps);
  for (uint32_t i = 0; i < block->warps; ++i) {
    Warp* other = block->warp[i];
    if ((barrier->warps >> i & 1) && other->state == State::at_barrier) {
      other->state = State::ready;
      add_runnable(other);
    }
  }
  barrier->warps = 0;
  barrier->threads = 0;
}

UNWATCHED inline bool barrier_is_full(const Block* block, uint32_t id) {
  const Barrier& barrier = block->barriers[id];
  if (id == 0) return barrier.warps && barrier.warps == block->alive;
  return (uint32_t)__builtin_popcount(barrier.warps) * WARP == barrier.threads;
}

// Called by the last lane of a warp to arrive.
UNWATCHED inline void wait_at_barrier(Lane* me, uint32_t id, uint32_t threads) {
  Warp* warp = me->warp;
  Block* block = warp->block;
  Barrier* barrier = &block->barriers[id];
  if (barrier->warps == 0) barrier->threads = threads;
  if (barrier->threads != threads) {
    append("barrier mismatch: ");
    append_who(me);
    append(" calls ");
    append_site(warp->gathering);
    append(" number %u for %u threads, but others wait there for %u", id, threads, barrier->threads);
    leave();
  }
  ++machine.epoch;
  barrier->warps |= 1u << warp->index;
  warp->state = State::at_barrier;
  remove_runnable(warp);
  if (barrier_is_full(block, id)) release_barrier(block, barrier);
  yield_warp();
}

UNWATCHED inline void block_rendezvous(Site site, uint32_t id, uint32_t threads) {
  Lane* me = machine.current;
  Block* block = me->warp->block;
  if (site.operation == Operation::group_barrier &&
      (id == 0 || id >= BARRIERS || threads == 0 || threads % WARP || threads > block->warps * WARP)) {
    append("bad barrier: ");
    append_who(me);
    append(" calls ");
    append_site(site);
    append(" with id %u (1 to %u) and %u threads (whole warps, at most %u)", id, BARRIERS - 1, threads,
           block->warps * WARP);
    leave();
  }
  if (rendezvous(me, site, (uint64_t)id << 32 | threads)) wait_at_barrier(me, id, threads);
}

UNWATCHED inline void warp_meeting(Lane* me, const char* file, uint32_t line) {
  if (rendezvous(me, Site{Operation::warp_barrier, line, file}, 0)) {
    note_meeting(me->warp->block, 1u << me->warp->index);
    preempt_sometimes(1);
  }
}

UNWATCHED inline void collective(Lane* me, Operation operation, const char* file, uint32_t line) {
  if (rendezvous(me, Site{operation, line, file}, 0)) preempt_sometimes(1);
}

// A primitive that other blocks can observe is about to act.
UNWATCHED inline void observe(Operation operation, const char* file, uint32_t line) {
  machine.current->warp->observed = Site{operation, line, file};
  preempt_sometimes(1 + (machine.mean_burst >> 3));
}

UNWATCHED inline void poll_failed(const char* file, uint32_t line) {
  Warp* warp = machine.current->warp;
  warp->observed = Site{Operation::wait_a_little, line, file};
  ++machine.report->failed_polls;
  if (machine.stuck_epoch != machine.epoch) {
    machine.stuck_epoch = machine.epoch;
    machine.stuck_warps = 0;
  }
  if (warp->poll_epoch != machine.epoch) {
    warp->poll_epoch = machine.epoch;
    warp->failed_polls = 0;
  }
  if (++warp->failed_polls == FAILED_POLLS_PER_WARP) ++machine.stuck_warps;
  warp->state = State::polling;
  yield_warp();
  warp->state = State::ready;
}

// ---- lanes, warps, blocks

UNWATCHED inline void lane_main() {
  machine.options.entry(machine.options.params);
  Lane* me = machine.current;
  Warp* warp = me->warp;
  if (warp->arrived) {
    append("divergence in a collective: ");
    append_who(me);
    append(" returns from the kernel while %u lanes of its warp wait in ", warp->arrived);
    append_site(warp->gathering);
    leave();
  }
  if (++warp->finished == WARP) {
    warp->state = State::done;
    remove_runnable(warp);
    ++machine.epoch;
    Block* block = warp->block;
    block->alive &= ~(1u << warp->index);
    if (barrier_is_full(block, 0)) release_barrier(block, &block->barriers[0]);
    yield_warp();
  }
  switch_lane(me, me->next);
  __builtin_unreachable();
}

UNWATCHED inline char* stack_of(Warp* warp, uint32_t lane) { return warp->stacks + lane * (STACK_BYTES + PAGE) + PAGE; }

UNWATCHED inline void start_block(Block* block, uint32_t index) {
  const LaunchOptions& options = machine.options;
  block->index = index;
  block->live = true;
  block->warps = options.threads / WARP;
  block->alive = block->warps == 32 ? ~0u : (1u << block->warps) - 1;
  block->lazy = machine.random.below(4) == 0;
  memset(block->barriers, 0, sizeof block->barriers);
  memset(block->mapping + SHARED_GUARD_BYTES, 0xff, machine.shared_mapping_bytes - 2 * SHARED_GUARD_BYTES);
  watch_block_start(block);
  for (uint32_t w = 0; w < block->warps; ++w) {
    Warp* warp = block->warp[w];
    warp->block = block;
    warp->index = w;
    warp->arrived = warp->finished = warp->phase = 0;
    warp->argument = 0;
    warp->gathering = warp->observed = Site{Operation::none, 0, nullptr};
    warp->state = State::ready;
    warp->poll_epoch = ~0ull;
    warp->failed_polls = 0;
    uint32_t ring[WARP];
    for (uint32_t i = 0; i < WARP; ++i) {
      uint32_t j = machine.random.below(i + 1);
      ring[i] = ring[j];
      ring[j] = i;
    }
    // Frames of all lanes at equal offsets would fall into the same cache set: the tops of the stacks are staggered.
    for (uint32_t i = 0; i < WARP; ++i) {
      Lane* lane = &warp->lanes[ring[i]];
      lane->next = &warp->lanes[ring[(i + 1) % WARP]];
      lane->warp = warp;
      lane->thread = w * WARP + ring[i];
      prepare_context(&lane->context, stack_of(warp, ring[i]), STACK_BYTES - ring[i] * 128 % PAGE, lane_main);
    }
    warp->resume = &warp->lanes[ring[0]];
    add_runnable(warp);
  }
  ++machine.epoch;
}

UNWATCHED inline bool shared_gaps_intact(const Block* block) {
  const char* begin = block->mapping + SHARED_GUARD_BYTES;
  const char* end = block->mapping + machine.shared_mapping_bytes - SHARED_GUARD_BYTES;
  for (const char* p = begin; p < end; ++p)
    if ((p < block->shared || p >= block->shared + machine.options.shared_bytes) && *p != (char)0xff) return false;
  return true;
}

UNWATCHED inline void describe_waiting() {
  uint32_t lines = 0;
  for (uint32_t s = 0; s < machine.slot_count; ++s) {
    Block* block = &machine.slots[s];
    if (!block->live) continue;
    for (uint32_t w = 0; w < block->warps; ++w) {
      Warp* warp = block->warp[w];
      if (warp->state == State::done) continue;
      if (++lines > 24) {
        append("\n  ...");
        return;
      }
      append("\n  block %u, warp %u ", block->index, w);
      if (warp->state == State::at_barrier) {
        append("waits at ");
        append_site(warp->gathering);
        if (warp->gathering.operation == Operation::group_barrier)
          append(" number %u for %u threads", (uint32_t)(warp->argument >> 32), (uint32_t)warp->argument);
      } else {
        append("polls in lane %u at ", warp->resume->thread % WARP);
        append_site(warp->observed);
        if (warp->arrived) {
          append(", %u lanes wait in ", warp->arrived);
          append_site(warp->gathering);
        }
      }
    }
  }
}

UNWATCHED inline Warp* draw_warp() {
  Warp* warp = machine.runnable[machine.random.below(machine.runnable_count)];
  for (int tries = 0; tries < 2 && warp->block->lazy && machine.random.below(16); ++tries)
    warp = machine.runnable[machine.random.below(machine.runnable_count)];
  return warp;
}

UNWATCHED inline void run_grid() {
  const LaunchOptions& options = machine.options;
  uint32_t started = 0, finished = 0, live = 0;
  while (finished < options.blocks) {
    for (uint32_t s = 0; s < machine.slot_count && live < machine.slot_count && started < options.blocks; ++s)
      if (!machine.slots[s].live) {
        start_block(&machine.slots[s], started++);
        ++live;
      }
    if (machine.out_of_time) {
      append("out of time: the launch took more than %g s of processor time", options.cpu_seconds);
      describe_waiting();
      machine.failed = true;
      return;
    }
    if (machine.runnable_count == 0) {
      append("deadlock: all warps wait at barriers that cannot fill");
      describe_waiting();
      machine.failed = true;
      return;
    }
    deliver_sometimes();
    bool stuck = machine.stuck_epoch == machine.epoch && machine.stuck_warps >= machine.runnable_count;
    if (stuck && machine.pending_count) {
      deliver_all();
    } else if (stuck) {
      append("deadlock: all warps poll and nothing is stored any more (%u of %u blocks started, %u resident)", started,
             options.blocks, machine.slot_count);
      describe_waiting();
      machine.failed = true;
      return;
    }
    Warp* warp = draw_warp();
    ++machine.report->switches_of_warps;
    machine.current = warp->resume;
    machine.running_fiber = true;
    switch_context(&machine.main, &warp->resume->context);
    if (machine.failed) return;
    Block* block = warp->block;
    if (warp->state == State::done && block->alive == 0) {
      if (!shared_gaps_intact(block)) {
        append("out of bounds write just past the %u bytes of shared memory of block %u", options.shared_bytes,
               block->index);
        machine.failed = true;
        return;
      }
      block->live = false;
      --live;
      ++finished;
    }
  }
  deliver_all();
}

// ---- signals

UNWATCHED inline void append_fault(const char* what, uintptr_t address) {
  append("%s: ", what);
  append_who(machine.current);
  for (uint32_t s = 0; s < machine.slot_count; ++s) {
    Block* block = &machine.slots[s];
    uintptr_t begin = (uintptr_t)block->mapping;
    if (address >= begin && address < begin + machine.shared_mapping_bytes) {
      append(", shared memory of block %u %+lld, size %u", block->index,
             (long long)(address - (uintptr_t)block->shared), machine.options.shared_bytes);
      return;
    }
  }
  Warp* warp = machine.current->warp;
  if (address >= (uintptr_t)warp->stacks && address < (uintptr_t)warp->stacks + WARP * (STACK_BYTES + PAGE))
    append(", stack overflow of a lane (%zu bytes)", STACK_BYTES);
}

constexpr int SIGNALS = 6;

UNWATCHED inline int timer_signal() { return SIGRTMIN + 4; }

UNWATCHED inline int handled_signal(int i) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
  return i < SIGNALS - 1 ? faults[i] : timer_signal();
}

UNWATCHED inline struct sigaction* previous_action(int signal_number) {
  static struct sigaction actions[SIGNALS];
  int i = 0;
  while (handled_signal(i) != signal_number) ++i;
  return &actions[i];
}

UNWATCHED inline void on_signal(int signal_number, siginfo_t* info, void* raw) {
  if (signal_number == timer_signal()) {
    machine.out_of_time = 1;
    if (!machine.running_fiber) return;  // the scheduler looks at the flag
    append("out of time: the launch took more than %g s of processor time, now in ", machine.options.cpu_seconds);
    append_who(machine.current);
    describe_waiting();
  } else if (!machine.running_fiber) {
    sigaction(signal_number, previous_action(signal_number), nullptr);  // not ours: let it happen again
    return;
  }
  LaunchReport* report = machine.report;
#if defined(__x86_64__)
  const greg_t* registers = ((ucontext_t*)raw)->uc_mcontext.gregs;
  report->fault_instruction = (uint64_t)registers[REG_RIP];
  report->fault_is_write = registers[REG_ERR] >> 1 & 1;
#elif defined(__aarch64__)
  report->fault_instruction = ((ucontext_t*)raw)->uc_mcontext.pc;
#endif
  if (signal_number == SIGSEGV || signal_number == SIGBUS) {
    report->faulted = 1;
    report->fault_address = (uint64_t)info->si_addr;
    append_fault(report->fault_is_write ? "out of bounds write" : "out of bounds access", (uintptr_t)info->si_addr);
  } else if (signal_number == SIGFPE) {
    append_fault("integer division by zero", 0);
  } else if (signal_number != timer_signal()) {
    // The checks that the driver has the compiler build in do not say which of them it was.
    append_fault("undefined behaviour: an index beyond its array, a shift past the width, a float too large for its "
                 "integer, or a misaligned address", 0);
  }
  leave();  // abandons this frame; the handlers do not mask signals, so there is nothing to undo
}

struct SignalGuard {
  stack_t old_stack;
  char* stack;
  timer_t timer;
  bool timed;

  bool install(double cpu_seconds) {
    constexpr size_t bytes = 64 << 10;
    stack = (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) return false;
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = bytes;
    if (sigaltstack(&alternate, &old_stack)) return false;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < SIGNALS; ++i) sigaction(handled_signal(i), &action, previous_action(handled_signal(i)));
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = timer_signal();
#ifdef sigev_notify_thread_id
    event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
#else
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
#endif
    timed = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0;
    if (timed) {
      itimerspec when = {};
      when.it_value.tv_sec = (time_t)cpu_seconds;
      when.it_value.tv_nsec = (long)((cpu_seconds - (double)(time_t)cpu_seconds) * 1e9) + 1;
      when.it_interval.tv_nsec = 50'000'000;  // again, if it came at a bad moment
      timer_settime(timer, 0, &when, nullptr);
    }
    return true;
  }

  void remove() {
    if (timed) timer_delete(timer);
    for (int i = 0; i < SIGNALS; ++i) sigaction(handled_signal(i), previous_action(handled_signal(i)), nullptr);
    // An empty alternate stack is reported with sizes that sigaltstack refuses to take back.
    if (old_stack.ss_flags & SS_DISABLE) old_stack.ss_size = MINSIGSTKSZ;
    sigaltstack(&old_stack, nullptr);
    munmap(stack, 64 << 10);
  }
};

// ---- launch

UNWATCHED inline bool reserve() {
  const LaunchOptions& options = machine.options;
  uint32_t warps_per_block = options.threads / WARP;
  machine.slot_count = options.resident < options.blocks ? options.resident : options.blocks;
  uint32_t needed = machine.slot_count * warps_per_block;
  machine.warps_bytes = needed * sizeof(Warp);
  machine.runnable = (Warp**)malloc(needed * sizeof(Warp*));
  void* warps = mmap(nullptr, machine.warps_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (warps == MAP_FAILED || !machine.runnable) return false;
  machine.warps = (Warp*)warps;
  for (uint32_t w = 0; w < needed; ++w) machine.warps[w].stacks = options.stacks[w];
  machine.runnable_count = 0;
  size_t inner = (options.shared_bytes + PAGE - 1) / PAGE * PAGE;
  machine.shared_mapping_bytes = inner + 2 * SHARED_GUARD_BYTES;
  machine.slots = (Block*)calloc(machine.slot_count, sizeof(Block));
  if (!machine.slots) return false;
  for (uint32_t s = 0; s < machine.slot_count; ++s) {
    Block* block = &machine.slots[s];
    char* mapping = (char*)mmap(nullptr, machine.shared_mapping_bytes, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return false;
    block->mapping = mapping;
    if (inner && mprotect(mapping + SHARED_GUARD_BYTES, inner, PROT_READ | PROT_WRITE)) return false;
    // Kernels may rely on 128-byte alignment, so up to 127 bytes remain between the end and the guard; they are
    // checked for writes when the block ends.
    size_t rounded = (options.shared_bytes + 127) / 128 * 128;
    block->shared = mapping + SHARED_GUARD_BYTES + (options.shared_flush_start ? 0 : inner - rounded);
    for (uint32_t w = 0; w < warps_per_block; ++w) block->warp[w] = &machine.warps[s * warps_per_block + w];
  }
  return true;
}

UNWATCHED inline void release() {
  for (uint32_t s = 0; machine.slots && s < machine.slot_count; ++s)
    if (machine.slots[s].mapping) munmap(machine.slots[s].mapping, machine.shared_mapping_bytes);
  free(machine.slots);
  free(machine.runnable);
  if (machine.warps) munmap(machine.warps, machine.warps_bytes);
  machine.slots = nullptr;
  machine.runnable = nullptr;
  machine.warps = nullptr;
}

UNWATCHED inline int launch(const LaunchOptions* options, LaunchReport* report) {
  memset(report, 0, sizeof *report);
  machine.options = *options;
  machine.report = report;
  machine.failed = false;
  machine.running_fiber = false;
  machine.out_of_time = 0;
  machine.epoch = 1;
  machine.stuck_epoch = 0;
  machine.stuck_warps = 0;
  machine.random.state = options->seed * 0x2545f4914f6cdd1dull + 1;
  static const uint32_t bursts[] = {64, 4, 1024, 16};
  machine.mean_burst = bursts[options->seed % 4];
  machine.pending_count = 0;
  static const uint32_t delays[] = {2, 64, 8, 512, 3};
  machine.mean_delay = delays[options->seed % 5];
  draw_burst();
  SignalGuard signals = {};
  if (!reserve()) {
    append("not enough memory for the fibers of %u blocks of %u threads", machine.slot_count, options->threads);
    machine.failed = true;
  } else if (!signals.install(options->cpu_seconds)) {
    append("the signal handlers could not be installed");
    machine.failed = true;
  } else {
    if (start_watching()) run_grid();
    else machine.failed = true;
    stop_watching();
    signals.remove();
  }
  release();
  return machine.failed ? 1 : 0;
}

}  // namespace emulator

extern "C" int emulator_launch(const emulator::LaunchOptions* options, emulator::LaunchReport* report) {
  return emulator::launch(options, report);
}

// The stacks of a warp's lanes, each above an inaccessible page. They serve all modules of a process.
extern "C" __attribute__((visibility("default"))) char* emulator_new_stacks() {
  using namespace emulator;
  size_t stride = STACK_BYTES + PAGE;
  char* stacks = (char*)mmap(nullptr, stride * WARP, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return nullptr;
  for (uint32_t i = 0; i < WARP; ++i)
    if (mprotect(stacks + i * stride, PAGE, PROT_NONE)) return nullptr;
  return stacks;
}
