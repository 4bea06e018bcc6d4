// The backward of a strip by a block, checkpoint by checkpoint in reverse.
//
//   (8)   E_ij = E_{i+1,j} p_up(i+1,j) + E_{i,j+1} p_left(i,j+1) + E_{i+1,j+1} p_diag(i+1,j+1),   E_NM = 1
//   (11)  the same of the derivatives, with p-dot of (15)
//
// Of each checkpoint: all warps make the entries of its cells, warp 0 recomputes its steps and keeps shares (7), b and c of
// (12), sweeps (8) and (11) through them in reverse, and all warps add what that means to the gradients. Other blocks of the
// processor are at work meanwhile.
//
// Alignment weight below LEAST_WEIGHT is dropped, with its derivative. A checkpoint that gets no weight, neither from the strip
// below nor from the checkpoint on its right, has E = 0 in all its cells and is left out.
#pragma once

#if INPUT == FLOAT64
#define LEAST_WEIGHT 1.1830521861667747e-271  // 2^-900
#else
#define LEAST_WEIGHT 5.4210109e-20f  // 2^-64
#endif

struct KeptCells { real up[CHECKPOINT * 32], left[CHECKPOINT * 32], diagonal[CHECKPOINT * 32], b[CHECKPOINT * 32], c[CHECKPOINT * 32]; };
struct alignas(16) BackwardShared {
  union {
    KeptCells kept;
    CostShared<CHECKPOINT> making;
    GradShared grads;
  };
  union {
    Entry entries[CHECKPOINT * 32];
    PartialSums partial;
  };
  Weights alignment, slope;
  SavedBound top[CHECKPOINT];
  Flow flow_in[CHECKPOINT], flow_out[CHECKPOINT];
  u32 ticket;
  i32 active;
};
static_assert(sizeof(BackwardShared) == BACKWARD_SHARED, "config_dual.py has another size of shared memory");

// The row above and the shares, b and c of a checkpoint's cells; by warp 0.
DEVICE void recompute(const Params& p, const Strip& s, BackwardShared& shared, i32 checkpoint) {
  const i32 lane = (i32)lane_index(), base = checkpoint * CHECKPOINT;
  const SavedBound* bound = saved_bound(p, s, s.index - 1);
  for (i32 i = lane; i < CHECKPOINT; i += 32) {
    const bool there = s.index > 0 && in_band(s, s.first_row - 1, base + i);
    shared.top[i] = there ? bound[base + i] : SavedBound{NO_PATH, (real)0, (real)0};
  }
  Walker w = load_checkpoint(p, s, checkpoint);
  warp_barrier();
  UNROLL_BY(1) for (i32 half = 0; half < CHECKPOINT; half += 16) {
    UNROLL_BY(4) for (i32 k = half; k < half + 16; k++) {
      const SavedBound& top = shared.top[k];
      const i32 at = k * 32 + lane;
      advance<false>(w, shared.entries[at], Above{Scaled{top.f, top.n}, top.v, (real)0}, [&](const Shares& share, real b, real c) {
        shared.kept.up[at] = share.up;
        shared.kept.left[at] = share.left;
        shared.kept.diagonal[at] = share.diagonal;
        shared.kept.b[at] = b;
        shared.kept.c[at] = c;
      });
    }
    renormalize(w);
  }
  warp_barrier();
}

// What each row's last cell sends on: left; up, with what its right neighbour sent diagonally; diagonally.
struct Sweep { Flow left, pass, diagonal; };
DEVICE bool has_weight(real e) { return !(e < LEAST_WEIGHT); }  // NaN has

DEVICE void sweep(Sweep& carried, const Params& p, const Strip& s, BackwardShared& shared, i32 base, i32 end, real seed) {
  const i32 lane = (i32)lane_index();
  const real inverse_gamma = (real)p.inverse_gamma;
  Flow left = carried.left, pass = carried.pass, diagonal = carried.diagonal;
  UNROLL_BY(4) for (i32 k = CHECKPOINT - 1; k >= 0; k--) {
    const i32 at = k * 32 + lane;
    const Shares share{shared.kept.up[at], shared.kept.left[at], shared.kept.diagonal[at]};
    const Slopes mu = slopes_of(share, shared.kept.b[at], shared.kept.c[at]);
    Flow come{from_lane_below(pass.e), from_lane_below(pass.slope)};
    if (lane == 31) come = shared.flow_in[k];
    real e = left.e + come.e, slope = left.slope + come.slope;
    if (base + k == end && s.first_row + lane == s.n - 1) e = seed, slope = seed * (real)0;
    // (15) and the product rule: what is sent to k is p_k (slope + e mu_k / gamma).
    const real scaled = e * inverse_gamma;
    const real up = multiply_add(scaled, mu.up, slope), diag = multiply_add(scaled, mu.diagonal, slope);
    left = Flow{e * share.left, multiply_add(scaled, mu.left, slope) * share.left};
    pass = Flow{multiply_add(e, share.up, diagonal.e), multiply_add(up, share.up, diagonal.slope)};
    diagonal = Flow{e * share.diagonal, diag * share.diagonal};
    shared.alignment.at[(k + WEIGHT_MARGIN) * WEIGHT_STRIDE + lane] = e;
    shared.slope.at[(k + WEIGHT_MARGIN) * WEIGHT_STRIDE + lane] = slope;
    if (lane == 0) shared.flow_out[k] = pass;
  }
  if (!any_lane(has_weight(left.e) || has_weight(pass.e) || has_weight(diagonal.e))) left = pass = diagonal = Flow{};
  carried = Sweep{left, pass, diagonal};
}

// Checkpoints that a strip has finished, for the strip above, which adds to the same columns of gY: the number of the last one
// plus one; 0 when all are.
DEVICE void await_finished(const Params& p, const Strip& s, i32 checkpoint) {
  if (s.is_last) return;
  const u32* finished = p.finished + (i64)s.pair * p.strips + s.index + 1;
  Poll poll(Waiter{"the strip below to add to grad_y", s.pair, s.index}, s.index + 1, checkpoint);
  while (load_acquire(finished) > (u32)checkpoint) poll.failed();
}

DEVICE void backward_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  const i32 thread = (i32)thread_index(), lane = (i32)lane_index();
  const bool walks = warp_index() == 0;
  const u32 walk_index = (u32)((s.n - 1) / STRIP_ROWS - s.index);
  Word4* row = handoff_row(p, s.pair);
  const result_type value = ((const result_type*)p.value)[s.pair];
  const real seed = value - value == 0 ? (real)1 : value != value ? (real)value : (real)0;  // no path: nothing to pass back
  const i32 end = s.is_last ? final_step(s) : -1;
  const bool sums_columns = p.grad_y || p.grad_b;
  Sweep carried{};
  bool expected = false;  // whether the next checkpoint is likely to have weight
  for (i32 i = thread; i < WEIGHT_MARGIN * WEIGHT_STRIDE; i += BACKWARD_THREADS) {
    const i32 behind = i + (CHECKPOINT + WEIGHT_MARGIN) * WEIGHT_STRIDE;
    shared.alignment.at[i] = shared.slope.at[i] = shared.alignment.at[behind] = shared.slope.at[behind] = 0;
  }
  auto prepare = [&](i32 checkpoint) {
    make_entries<CHECKPOINT>(shared.entries, shared.making, p, s, checkpoint * CHECKPOINT, 1, thread);
    block_barrier();
    if (walks) recompute(p, s, shared, checkpoint);
  };
  for (i32 checkpoint = last_step(s) / CHECKPOINT; checkpoint >= first_checkpoint(s); checkpoint--) {
    const i32 base = checkpoint * CHECKPOINT;
    if (expected) prepare(checkpoint);
    if (walks) {
      bool active = has_weight(carried.left.e) || has_weight(carried.pass.e) || has_weight(carried.diagonal.e);
      active |= end >= base && end < base + CHECKPOINT && seed != (real)0;
      for (i32 i = lane; i < CHECKPOINT; i += 32) {
        Flow flow{};
        const i32 column = base + i - 31;
        if (!s.is_last && passes_up(s, s.first_row + STRIP_ROWS, column)) {
          flow = unpack_flow(await_word<FLOW_PARTS>(row, column, walk_index - 1, Waiter{"what the strip below passes up", s.pair, s.index}));
          if (!has_weight(flow.e)) flow = Flow{};
        }
        active |= flow.e != (real)0;
        shared.flow_in[i] = flow;
      }
      active = any_lane(active);
      if (lane == 0) shared.active = active;
    }
    block_barrier();
    const bool active = shared.active;
    if (active && !expected) prepare(checkpoint);
    expected = active;
    if (walks) {
      if (active) sweep(carried, p, s, shared, base, end, seed);
      warp_barrier();
      for (i32 i = lane; i < CHECKPOINT; i += 32)
        if (s.index > 0 && passes_up(s, s.first_row, base + i))
          store_word(row, base + i, walk_index, pack_flow(active ? shared.flow_out[i] : Flow{}));
    }
    if (sums_columns && thread == 0) await_finished(p, s, checkpoint);
    block_barrier();
    if (active) {
      add_gradients(p, s, shared.alignment, shared.slope, shared.grads, shared.partial, base, thread);
      block_barrier();
    }
    if (sums_columns && thread == 0 && s.index > 0)
      store_release(p.finished + (i64)s.pair * p.strips + s.index, checkpoint == first_checkpoint(s) ? 0u : (u32)checkpoint + 1);
  }
}
DEVICE void backward_pass(const Params& p, BackwardShared& shared) {
  if (thread_index() == 0) shared.ticket = next_ticket(p);
  block_barrier();
  const Assignment mine = assignment_of(p, shared.ticket);
  const Strip s = strip_of(p, mine.pair, p.strips - 1 - mine.position);
  if (s.valid && s.present) backward_strip(p, s, shared);
}
