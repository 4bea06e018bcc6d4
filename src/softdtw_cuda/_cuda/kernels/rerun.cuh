// Reruns with wide numbers.
//
// The launch that follows a narrow kernel walks flagged pairs again, and leaves the scratch as the first fill had it, so
// that the next launch on the same state finds it so; what no launch writes of a state is ones, too. A pair's progress says
// how far its walks have come, a walk of the forward in the first two words, of the backward in the last two:
//   rows    1 once the walk's first strip has cleared what the walk before left behind
//   strips  how many strips (less one, from all ones) are done, in the order of the walk
// Each strip waits only for strips with earlier tickets: those of its own walk before it, and all of the walk before.
#pragma once

enum Walk { FORWARD_WALK, BACKWARD_WALK };

DEVICE u32* rows_progress(const Params& p, i32 pair, i32 walk) { return p.progress + (i64)pair * 4 + walk * 2; }
DEVICE u32* strips_progress(const Params& p, i32 pair, i32 walk) { return rows_progress(p, pair, walk) + 1; }
DEVICE void await_progress(const u32* progress, u32 wanted, const Waiter& waiter) {
  Poll poll(waiter, (i32)wanted, (i32)wanted);
  if (lane_index() == 0) while (load_acquire(progress) != wanted) poll.failed();
  warp_barrier();
}
DEVICE void clear_rows(const Params& p, i32 pair, bool further) {
  const Word4 ones{~0u, ~0u, ~0u, ~0u};
  const HandoffRow row = handoff_row(p, pair);
  if (p.row_bytes)
    for (i32 i = (i32)lane_index(); i < (i32)(p.row_bytes / sizeof(Word4)); i += 32) {
      row.first[i] = ones;
      if (further) row.second[i] = ones;
    }
  if (p.grad_y_order)
    for (i32 i = (i32)lane_index(); i < p.tiles; i += 32) p.grad_y_order[(i64)pair * p.tiles + i] = ~0u;
}
DEVICE_CALL void begin_rerun(const Params& p, i32 pair, i32 walk, i32 position, i32 last) {
  if (position > 0) {
    await_progress(rows_progress(p, pair, walk), 1u, Waiter{"rerun: the hand-off row to be cleared", pair, position});
    return;
  }
  if (walk == BACKWARD_WALK)
    await_progress(strips_progress(p, pair, FORWARD_WALK), (u32)last, Waiter{"rerun: the end of the forward", pair, position});
  clear_rows(p, pair, true);
  warp_barrier();
  if (lane_index() == 0) store_release(rows_progress(p, pair, walk), 1u);
}
// The part of a pair that the main kernel does not save into.
DEVICE void fill_rest(const Params& p, i32 pair) {
  UNROLL_BY(1) for (i64 at = p.saved_bytes + (i64)lane_index() * 8; at < p.pair_bytes; at += 32 * 8)
    *(Word2*)(p.states + pair * p.pair_bytes + at) = Word2{~0u, ~0u};
}
// The pair's scratch as the first fill had it.
DEVICE_CALL void restore_scratch(const Params& p, i32 pair) {
  if (!p.scratch) return;
  clear_rows(p, pair, false);
  fill_rest(p, pair);
  if (lane_index() < 4) p.progress[(i64)pair * 4 + lane_index()] = ~0u;
}
DEVICE_CALL void end_rerun(const Params& p, i32 pair, i32 walk, i32 position, i32 last, bool last_walk) {
  warp_barrier();
  u32* progress = strips_progress(p, pair, walk);
  if (position > 0) await_progress(progress, (u32)(position - 1), Waiter{"rerun: the strip before it", pair, position});
  if (last_walk && position == last) restore_scratch(p, pair);
  else if (lane_index() == 0) store_release(progress, (u32)position);
}
// No pair was flagged: the blocks share the clearing of everything.
DEVICE void restore_scratch(const Params& p) {
  if (!p.scratch) return;
  for (i64 i = (i64)block_index() * 32 + lane_index(); i < p.scratch_bytes / 16; i += (i64)p.blocks * 32)
    ((Word4*)p.scratch)[i] = Word4{~0u, ~0u, ~0u, ~0u};
  for (i32 pair = (i32)block_index(); pair < p.batch; pair += p.blocks) fill_rest(p, pair);
}
