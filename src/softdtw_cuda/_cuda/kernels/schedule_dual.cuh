// Which checkpoints a strip of the backward visits, and what it publishes for the strips above.
//
// Alignment weight moves up and left only, and most of the matrix has none. A strip
//   begins   at the checkpoint in which the strip p.start_lag before it in the walk first received weight: as a step, a
//            strip's first weight comes no later than that of a strip below it. The first strips begin at their last step.
//   ends     when it has passed its own weight on and nothing more can come from the strip below.
// What it does not visit has E = 0. Weight below LEAST_WEIGHT is dropped, with its derivative.
//
// Every strip publishes begin, end and finished at last, whatever comes to it, so nobody waits for ever. It stores the words of
// its row from its first checkpoint to its last, and a strip above visits no checkpoint right of that. Of columns left of
// its end there are no words: they are zeros, whether the reader finds that out at once or waits for it, so that the result does
// not depend on who is quicker.
#pragma once

struct alignas(16) Progress {
  u32 begin;     // the checkpoint where it first received weight
  u32 end;       // the last checkpoint that it visits
  u32 finished;  // checkpoints that it has added to gY: the number of the last one plus one; 0 when all are
  u32 unused;
};
DEVICE i32 walk_index_of(const Strip& s) { return (s.n - 1) / STRIP_ROWS - s.index; }
// Of the strip `below` strips further down.
DEVICE Progress* progress_of(const Params& p, const Strip& s, i32 below) { return (Progress*)p.progress + (i64)s.pair * p.strips + s.index + below; }
DEVICE void publish_begin(const Params& p, const Strip& s, i32 checkpoint) {
  if (lane_index() == 0) store_release(&progress_of(p, s, 0)->begin, (u32)checkpoint);
}
DEVICE void publish_end(const Params& p, const Strip& s, i32 checkpoint) {
  if (lane_index() == 0) store_release(&progress_of(p, s, 0)->end, (u32)checkpoint);
}
// By a thread that has passed a barrier with all that have added.
DEVICE void publish_finished(const Params& p, const Strip& s, u32 finished) { store_release(&progress_of(p, s, 0)->finished, finished); }

// The first checkpoint that a strip visits.
DEVICE i32 await_start(const Params& p, const Strip& s) {
  const i32 last = last_step(s) / CHECKPOINT, lag = p.start_lag;
  if (walk_index_of(s) < lag) return last;
  const u32* begin = &progress_of(p, s, lag)->begin;
  Poll poll(Waiter{"a strip below to find weight", s.pair, s.index}, walk_index_of(s) - lag, 0);
  u32 v = load_acquire(begin);
  while (v == ~0u) {
    poll.failed();
    v = load_acquire(begin);
  }
  return (i32)v < last ? (i32)v : last;
}
// What the strip below passes up at this column.
DEVICE Flow await_flow(const Params& p, const Strip& s, const Word4* row, i32 column, u32 owner) {
  if (s.is_last || !passes_up(s, s.first_row + STRIP_ROWS, column)) return Flow{};
  const u32* end = &progress_of(p, s, 1)->end;
  Poll poll(Waiter{"what the strip below passes up", s.pair, s.index}, (i32)owner, column);
  for (;;) {
    const RowWord<FLOW_PARTS> w = load_word<FLOW_PARTS>(row, column, owner);
    if (w.there) return unpack_flow(w);
    const u32 last = load_acquire(end);
    if (last != ~0u && column < (i32)last * CHECKPOINT) return Flow{};
    poll.failed();
  }
}
// Whether words of the strip below can still come to this checkpoint or those on its left; asked of a strip that has no weight.
DEVICE bool may_receive(const Params& p, const Strip& s, i32 checkpoint) {
  if (s.is_last) return false;
  const u32 last = from_lane(lane_index() == 0 ? load_acquire(&progress_of(p, s, 1)->end) : 0u, 0);
  return last == ~0u || checkpoint >= (i32)last;
}
// A strip adds to the columns of a checkpoint when the strip below is done with them: with the checkpoint on its left.
DEVICE void await_finished(const Params& p, const Strip& s, i32 checkpoint) {
  if (s.is_last) return;
  const u32* finished = &progress_of(p, s, 1)->finished;
  Poll poll(Waiter{"the strip below to add to grad_y", s.pair, s.index}, walk_index_of(s) - 1, checkpoint);
  while (load_acquire(finished) > (u32)checkpoint) poll.failed();
}
