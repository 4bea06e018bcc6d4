// The backward of a strip by a block, checkpoint by checkpoint in reverse.
//
//   (8)   E_ij = E_{i+1,j} p_up(i+1,j) + E_{i,j+1} p_left(i,j+1) + E_{i+1,j+1} p_diag(i+1,j+1),   E_NM = 1
//   (11)  the same of the derivatives, with p-dot of (15)
//
// A checkpoint goes through four hands: its entries are made; one warp recomputes its steps and keeps shares (7), b and c of
// (12); one warp sweeps (8) and (11) through them in reverse; what that means is added to the gradients. schedule_dual.cuh has
// which checkpoints a strip visits.
//
//   PIPELINED 1  each hand has warps of its own, which work on different checkpoints at the same time. In slot t the
//                checkpoint of order t is recomputed, t - 1 swept, t - 2 added to the gradients; entries are made half a
//                checkpoint ahead. One block barrier a slot.
//   PIPELINED 0  all warps do one after the other, in memory that they share; other blocks of the processor are at work
//                meanwhile. For cards without room for more, and for float64.
#pragma once

#if INPUT == FLOAT64
#define LEAST_WEIGHT 1.1830521861667747e-271  // 2^-900
#else
#define LEAST_WEIGHT 5.4210109e-20f  // 2^-64
#endif

#if PIPELINED
#define BUFFERS 2
#define OVERLAID struct
#define MAKE_STEPS (CHECKPOINT / 2)
#define RECOMPUTE_WARP 1
#define MAKE_WARP 2
#define GRAD_WARP (MAKE_WARP + 4 * MAKE_STEPS / 32)
#define BACKWARD_THREADS (32 * GRAD_WARP + GRAD_THREADS)
#else
#define BUFFERS 1
#define OVERLAID union
#define MAKE_STEPS CHECKPOINT
#define BACKWARD_THREADS GRAD_THREADS
#endif
// Numbers of barriers.
#define MAKE_BARRIER 1
#define HALF_BARRIER 2
static_assert(GRAD_BARRIER > HALF_BARRIER, "barriers of their own");

struct KeptCells { real up[CHECKPOINT * 32], left[CHECKPOINT * 32], diagonal[CHECKPOINT * 32], b[CHECKPOINT * 32], c[CHECKPOINT * 32]; };
struct alignas(16) BackwardShared {
  OVERLAID Work {
    KeptCells kept[BUFFERS];
    CostShared<MAKE_STEPS> making;
    GradShared grads;
  } work;
  OVERLAID Tables {
    Entry entries[CHECKPOINT * 32];
    PartialSums partial;
  } cells;
  struct { Weights alignment, slope; Marks marks; } weights[BUFFERS];
  SavedBound top[CHECKPOINT];
  Flow flow_in[CHECKPOINT], flow_out[CHECKPOINT];
  Strip strip;          // here, since the roles need their registers
  u32 ticket;
  i32 start;            // the first checkpoint of the strip's visit
  i32 active[BUFFERS];  // whether the checkpoint that was swept has weight
  i32 more[2];          // whether another slot follows
};
static_assert(sizeof(BackwardShared) == BACKWARD_SHARED, "config_dual.py has another size of shared memory");

// Entries of the steps from `first` on of a checkpoint, by 4 * MAKE_STEPS threads.
DEVICE void make_part(const Params& p, const Strip& s, BackwardShared& shared, i32 checkpoint, i32 first, i32 thread) {
  make_entries<MAKE_STEPS>(shared.cells.entries + first * 32, shared.work.making, p, s, checkpoint * CHECKPOINT + first, MAKE_BARRIER, thread);
}

// The row above of a checkpoint, by one warp.
DEVICE void load_top(const Params& p, const Strip& s, BackwardShared& shared, i32 checkpoint) {
  const i32 base = checkpoint * CHECKPOINT;
  const SavedBound* bound = saved_bound(p, s, s.index - 1);
  for (i32 i = (i32)lane_index(); i < CHECKPOINT; i += 32) {
    const bool there = s.index > 0 && in_band(s, s.first_row - 1, base + i);
    shared.top[i] = there ? bound[base + i] : SavedBound{NO_PATH, (real)0, (real)0};
  }
  warp_barrier();
}
// Shares, b and c of the cells of the steps from `first` on of a checkpoint; by one warp.
DEVICE void recompute_part(Walker& w, BackwardShared& shared, KeptCells& kept, i32 first) {
  const i32 lane = (i32)lane_index();
  UNROLL_BY(1) for (i32 half = first; half < first + MAKE_STEPS; half += 16) {
    UNROLL_BY(1) for (i32 group = half; group < half + 16; group += GROUP_STEPS) {
      Entry entry[GROUP_STEPS];
      SavedBound top[GROUP_STEPS];
      UNROLL for (int k = 0; k < GROUP_STEPS; k++) {
        entry[k] = shared.cells.entries[(group + k) * 32 + lane];
        top[k] = shared.top[group + k];
      }
      UNROLL for (int k = 0; k < GROUP_STEPS; k++) {
        const i32 at = (group + k) * 32 + lane;
        advance<false>(w, entry[k], Above{Scaled{top[k].f, top[k].n}, top[k].v, (real)0}, [&](const Shares& share, real b, real c) {
          kept.up[at] = share.up;
          kept.left[at] = share.left;
          kept.diagonal[at] = share.diagonal;
          kept.b[at] = b;
          kept.c[at] = c;
        });
      }
    }
    renormalize(w);
  }
}

// What each row's last cell sends on: left; up, with what its right neighbour sent diagonally; diagonally.
struct Sweep { Flow left, pass, diagonal; };
DEVICE bool has_weight(real e) { return !(e < LEAST_WEIGHT); }  // NaN has
DEVICE bool has_weight(const Sweep& sweep) { return has_weight(sweep.left.e) || has_weight(sweep.pass.e) || has_weight(sweep.diagonal.e); }

// The cells of a checkpoint, from the last step to the first.
DEVICE void sweep_cells(Sweep& carried, const Params& p, const Strip& s, BackwardShared& shared, i32 buffer, i32 base, i32 end, real seed) {
  const i32 lane = (i32)lane_index();
  const real inverse_gamma = (real)p.inverse_gamma;
  const KeptCells& kept = shared.work.kept[buffer];
  real* alignment = shared.weights[buffer].alignment.at + WEIGHT_MARGIN * WEIGHT_STRIDE + lane;
  real* slopes = shared.weights[buffer].slope.at + WEIGHT_MARGIN * WEIGHT_STRIDE + lane;
  Flow left = carried.left, pass = carried.pass, diagonal = carried.diagonal;
  u64 marks = 0;
  UNROLL_BY(1) for (i32 group = CHECKPOINT - GROUP_STEPS; group >= 0; group -= GROUP_STEPS) {
    Shares shares[GROUP_STEPS];
    real b[GROUP_STEPS], c[GROUP_STEPS];
    Flow in[GROUP_STEPS];
    UNROLL for (int k = 0; k < GROUP_STEPS; k++) {
      const i32 at = (group + k) * 32 + lane;
      shares[k] = Shares{kept.up[at], kept.left[at], kept.diagonal[at]};
      b[k] = kept.b[at];
      c[k] = kept.c[at];
      in[k] = shared.flow_in[group + k];
    }
    UNROLL for (int k = GROUP_STEPS - 1; k >= 0; k--) {
      const i32 step = group + k;
      const Shares& share = shares[k];
      const Slopes mu = slopes_of(share, b[k], c[k]);
      Flow come{from_lane_below(pass.e), from_lane_below(pass.slope)};
      if (lane == 31) come = in[k];
      real e = left.e + come.e, slope = left.slope + come.slope;
      if (base + step == end && s.first_row + lane == s.n - 1) e = seed, slope = seed * (real)0;
      // (15) and the product rule: what is sent to k is p_k (slope + e mu_k / gamma).
      const real scaled = e * inverse_gamma;
      const real up = multiply_add(scaled, mu.up, slope), diag = multiply_add(scaled, mu.diagonal, slope);
      left = Flow{e * share.left, multiply_add(scaled, mu.left, slope) * share.left};
      pass = Flow{multiply_add(e, share.up, diagonal.e), multiply_add(up, share.up, diagonal.slope)};
      diagonal = Flow{e * share.diagonal, diag * share.diagonal};
      alignment[step * WEIGHT_STRIDE] = e;
      slopes[step * WEIGHT_STRIDE] = slope;
      marks = marks << 1 | (e != (real)0 || slope != (real)0);
      if (lane == 0) shared.flow_out[step] = pass;
    }
  }
  shared.weights[buffer].marks.steps[lane] = marks;
  carried = Sweep{left, pass, diagonal};
  if (!any_lane(has_weight(carried))) carried = Sweep{};
}

// The sweep of a strip by one warp.
struct Sweeper {
  Sweep carried;
  real seed;       // E of the pair's last cell
  i32 end;         // its step; -1 if it is not in this strip
  u32 walk_index;
  bool begun;      // it has had weight
};
DEVICE Sweeper open_sweep(const Params& p, const Strip& s) {
  const result_type value = ((const result_type*)p.value)[s.pair];
  Sweeper w{};
  w.seed = value - value == 0 ? (real)1 : value != value ? (real)value : (real)0;  // no path: nothing to pass back
  w.end = s.is_last ? final_step(s) : -1;
  w.walk_index = (u32)walk_index_of(s);
  return w;
}
// Returns whether the strip goes on to the next checkpoint.
DEVICE bool sweep_checkpoint(Sweeper& w, const Params& p, const Strip& s, BackwardShared& shared, i32 checkpoint, i32 buffer) {
  const i32 lane = (i32)lane_index(), base = checkpoint * CHECKPOINT;
  Word4* row = handoff_row(p, s.pair);
  bool active = has_weight(w.carried) || (w.end >= base && w.end < base + CHECKPOINT && w.seed != (real)0);
  for (i32 i = lane; i < CHECKPOINT; i += 32) {
    const Flow flow = await_flow(p, s, row, base + i - 31, w.walk_index - 1);
    const bool weighs = has_weight(flow.e);
    active |= weighs;
    shared.flow_in[i] = weighs ? flow : Flow{};
  }
  // Words that nobody reads, but that this strip is about to overwrite: they must have been stored.
  if (checkpoint == shared.start && lane < 31) await_flow(p, s, row, base + CHECKPOINT - 31 + lane, w.walk_index - 1);
  active = any_lane(active);
  if (active && !w.begun) publish_begin(p, s, s.is_last ? (s.m + 30) / CHECKPOINT : checkpoint);
  w.begun |= active;
  warp_barrier();
  if (active) sweep_cells(w.carried, p, s, shared, buffer, base, w.end, w.seed);
  warp_barrier();
  for (i32 i = lane; i < CHECKPOINT; i += 32)
    if (s.index > 0 && passes_up(s, s.first_row, base + i))
      store_word(row, base + i, w.walk_index, pack_flow(active ? shared.flow_out[i] : Flow{}));
  if (lane == 0) shared.active[buffer] = active;
  const bool more = checkpoint > first_checkpoint(s) && (any_lane(has_weight(w.carried)) || may_receive(p, s, checkpoint - 1));
  if (!more) {
    if (!w.begun) publish_begin(p, s, checkpoint);
    publish_end(p, s, checkpoint);
  }
  return more;
}

// A checkpoint's part of the gradients, by GRAD_THREADS threads.
DEVICE void add_checkpoint(const Params& p, const Strip& s, BackwardShared& shared, i32 checkpoint, i32 buffer, i32 thread) {
  const bool sums_columns = p.grad_y || p.grad_b;
  if (sums_columns && thread == 0) await_finished(p, s, checkpoint);
  group_barrier(GRAD_BARRIER, GRAD_THREADS);
  if (shared.active[buffer]) {
    add_gradients(p, s, shared.weights[buffer].alignment, shared.weights[buffer].slope, shared.weights[buffer].marks, shared.work.grads, shared.cells.partial,
                  checkpoint * CHECKPOINT, thread);
    group_barrier(GRAD_BARRIER, GRAD_THREADS);
  }
  if (sums_columns && thread == 0) publish_finished(p, s, (u32)checkpoint + 1);
}

#if PIPELINED
// This thread's number within its role, whose first warp is given. Read again for every checkpoint: what several roles, or
// checkpoints, derive from one index alike would be kept in registers by all.
DEVICE i32 own_thread(i32 first_warp) { return (i32)thread_index_opaque() - 32 * first_warp; }

DEVICE void make_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  // Part 0 is made before the first slot; parts 2 t + 1 and 2 t + 2 in slot t.
  for (i32 part = 0;; part++) {
    const i32 checkpoint = shared.start - part / 2, last = first_checkpoint(s);
    if (checkpoint >= last) make_part(p, s, shared, checkpoint, (part & 1) * MAKE_STEPS, own_thread(MAKE_WARP));
    if (part & 1) {
      if (checkpoint >= last) group_barrier(HALF_BARRIER, 4 * MAKE_STEPS + 32);
      continue;
    }
    block_barrier();
    if (part > 0 && !shared.more[(part / 2 - 1) & 1]) break;
  }
}
DEVICE void recompute_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  const i32 start = shared.start, last = first_checkpoint(s);
  block_barrier();
  for (i32 slot = 0;; slot++) {
    const i32 checkpoint = start - slot;
    if (checkpoint >= last) {
      load_top(p, s, shared, checkpoint);
      Walker w = load_checkpoint(p, s, checkpoint);
      UNROLL_BY(1) for (i32 first = 0; first < CHECKPOINT; first += MAKE_STEPS) {
        if (first) group_barrier(HALF_BARRIER, 4 * MAKE_STEPS + 32);
        recompute_part(w, shared, shared.work.kept[slot & 1], first);
      }
    }
    block_barrier();
    if (!shared.more[slot & 1]) break;
  }
}
DEVICE void sweep_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  Sweeper w = open_sweep(p, s);
  const i32 start = shared.start;
  bool more = true;
  block_barrier();
  for (i32 slot = 0;; slot++) {
    const bool another = more;  // gradients follow by a slot
    if (slot > 0 && more) more = sweep_checkpoint(w, p, s, shared, start - (slot - 1), (slot - 1) & 1);
    if (lane_index() == 0) shared.more[slot & 1] = another;
    block_barrier();
    if (!another) break;
  }
}
DEVICE void add_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  const i32 start = shared.start;
  block_barrier();
  for (i32 slot = 0;; slot++) {
    if (slot > 1) add_checkpoint(p, s, shared, start - (slot - 2), slot & 1, own_thread(GRAD_WARP));
    block_barrier();
    if (!shared.more[slot & 1]) break;
  }
  if (own_thread(GRAD_WARP) == 0) publish_finished(p, s, 0);
}
DEVICE void backward_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  const i32 warp = (i32)warp_index();
  if (warp >= GRAD_WARP) add_strip(p, s, shared);
  else if (warp >= MAKE_WARP) make_strip(p, s, shared);
  else if (warp == RECOMPUTE_WARP) recompute_strip(p, s, shared);
  else sweep_strip(p, s, shared);
}
#else
DEVICE void backward_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  const i32 thread = (i32)thread_index();
  Sweeper sweeper = open_sweep(p, s);
  for (i32 checkpoint = shared.start;; checkpoint--) {
    make_part(p, s, shared, checkpoint, 0, thread);
    block_barrier();
    if (warp_index() == 0) {
      load_top(p, s, shared, checkpoint);
      Walker w = load_checkpoint(p, s, checkpoint);
      recompute_part(w, shared, shared.work.kept[0], 0);
      const bool more = sweep_checkpoint(sweeper, p, s, shared, checkpoint, 0);
      if (thread == 0) shared.more[checkpoint & 1] = more;
    }
    block_barrier();
    add_checkpoint(p, s, shared, checkpoint, 0, thread);
    if (!shared.more[checkpoint & 1]) break;
  }
  if (thread == 0) publish_finished(p, s, 0);
}
#endif

DEVICE void backward_pass(const Params& p, BackwardShared& shared) {
  const i32 thread = (i32)thread_index();
  if (thread == 0) shared.ticket = next_ticket(p);
  block_barrier();
  const Assignment mine = assignment_of(p, shared.ticket);
  const Strip s = strip_of(p, mine.pair, p.strips - 1 - mine.position);
  if (!s.valid || !s.present) return;
  if (thread == 0) {
    shared.strip = s;
    shared.start = await_start(p, s);
  }
  for (i32 i = thread; i < WEIGHT_MARGIN * WEIGHT_STRIDE; i += BACKWARD_THREADS) {
    const i32 behind = i + (CHECKPOINT + WEIGHT_MARGIN) * WEIGHT_STRIDE;
    UNROLL for (int buffer = 0; buffer < BUFFERS; buffer++) {
      shared.weights[buffer].alignment.at[i] = shared.weights[buffer].alignment.at[behind] = 0;
      shared.weights[buffer].slope.at[i] = shared.weights[buffer].slope.at[behind] = 0;
    }
  }
  block_barrier();
  backward_strip(p, shared.strip, shared);
}
