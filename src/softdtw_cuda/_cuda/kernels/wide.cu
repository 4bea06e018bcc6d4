// Soft-DTW with wide numbers: for float64, for the pairs that narrow kernels flag, and for cards without room for tiles.
// One warp per strip, nothing but the recurrence.
#define WIDE 1
#define PACKED 0
#define SOURCE_NAME "wide"
#include "primitives.cuh"
#include "common.cuh"
#include "rerun.cuh"
#include "cells_wide.cuh"
#include "forward_wide.cuh"
#include "backward_wide.cuh"

#if HAS_PART(FORWARD_PART)
// A strip per warp; in a rerun, strip after strip of the flagged pairs.
KERNEL THREADS_PER_BLOCK(32, WIDE_FORWARD_BLOCKS) wide_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  if (p.rerun && all_in_range(p)) { restore_scratch(p); return; }
  do {
    const u32 ticket = next_ticket_of_warp(p);
    if (ticket >= (u32)p.batch * (u32)opaque(p.strips)) return;  // nothing to keep in a register from strip to strip
    const Assignment mine = assignment_of(p, ticket);
    const Strip s = strip_of(p, mine.pair, mine.position);
    if (p.rerun && (is_in_range(p, s.pair) || !s.valid)) {
      if (mine.position == 0) restore_scratch(p, s.pair);
      continue;
    }
    if (!s.valid) {
      if (s.index == 0 && lane_index() == 0) store_invalid_value(p, s.pair);
      continue;
    }
    if (!s.present) continue;
    if (p.rerun) begin_rerun(p, s.pair, FORWARD_WALK, s.index, (s.n - 1) / STRIP_ROWS);
    forward_strip(p, s, *(ForwardShared*)memory);
    warp_barrier();
    if (p.rerun) end_rerun(p, s.pair, FORWARD_WALK, s.index, (s.n - 1) / STRIP_ROWS, true);
  } while (p.rerun);
}
#endif

#if HAS_PART(BACKWARD_PART)
KERNEL THREADS_PER_BLOCK(32, WIDE_BACKWARD_BLOCKS) wide_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  const Assignment mine = assignment_of(p, next_ticket_of_warp(p));
  const Strip s = strip_of(p, mine.pair, p.strips - 1 - mine.position);
  if (is_in_range(p, s.pair) && s.valid && s.present) backward_strip(p, s, *(BackwardShared*)memory);
}
#endif

#if HAS_PART(RERUN_PART)
// The backward of flagged pairs. The forward's rerun kept nothing, so they are walked forwards once more, with wide states
// in the pair's own place, and then backwards; tickets of the first walk come before all of the second. Without tickets, where
// every pair is one strip, block b takes those of pair b.
static_assert(sizeof(ForwardShared) <= BACKWARD_SHARED, "the walks share their memory");
KERNEL THREADS_PER_BLOCK(32, WIDE_RERUN_BLOCKS) wide_rerun(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  if (p.tickets ? all_in_range(p) : is_in_range(p, (i32)block_index())) { restore_scratch(p); return; }
  const u32 tickets = (u32)p.batch * (u32)p.strips;
  for (u32 walked = 0;; walked++) {
    const u32 ticket = p.tickets ? next_ticket_of_warp(p) : block_index() + walked * tickets;
    const i32 walk = ticket < tickets ? FORWARD_WALK : BACKWARD_WALK;
    if (ticket >= 2u * tickets) return;
    const Assignment mine = assignment_of(p, ticket - (walk == BACKWARD_WALK ? tickets : 0u));
    const Strip s = strip_of(p, mine.pair, walk == BACKWARD_WALK ? p.strips - 1 - mine.position : mine.position);
    if (is_in_range(p, s.pair) || !s.valid) {
      if (walk == FORWARD_WALK && mine.position == 0) restore_scratch(p, s.pair);
      continue;
    }
    if (!s.present) continue;
    const i32 last = (s.n - 1) / STRIP_ROWS, position = walk == BACKWARD_WALK ? last - s.index : s.index;
    begin_rerun(p, s.pair, walk, position, last);
    if (walk == FORWARD_WALK) forward_strip(p, s, *(ForwardShared*)memory);
    else backward_strip(p, s, *(BackwardShared*)memory);
    warp_barrier();
    end_rerun(p, s.pair, walk, position, last, walk == BACKWARD_WALK);
  }
}
#endif
