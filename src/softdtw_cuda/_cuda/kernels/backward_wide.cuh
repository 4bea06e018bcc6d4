// The backward of a strip with wide numbers, by one warp. Nothing is pruned.
//
// It takes the checkpoints in reverse; from each it recomputes the states every SUBWALK steps, then, last subwalk first,
// recomputes the shares (7) of SUBWALK steps into shared memory and sweeps (8) through them in reverse.
#pragma once

#define SUBWALKS (CHECKPOINT / SUBWALK)
static_assert(SUBWALK <= 32, "one lane has one column of a subwalk");
static_assert(SUBWALKS > 2, "states are kept of all subwalks but the first and the last");

struct alignas(64) BackwardShared {
  LaneShares shares[SUBWALK][32];
  LaneReals left[SUBWALK][32];
  Flow flow_in[SUBWALK], flow_out[SUBWALK];
  StoredState top[CHECKPOINT];
  CostSteps costs;
  SavedStates states[SUBWALKS - 2];  // at the begin of subwalks 1 and on, the last excepted
};
static_assert(sizeof(BackwardShared) == BACKWARD_SHARED, "kernel.py has another size of shared memory");

DEVICE void backward_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  const i32 lane = (i32)lane_index();
  const i32 walk_index = (s.n - 1) / STRIP_ROWS - s.index;
  const u32 owner_in = (u32)(walk_index - 1), owner_out = (u32)walk_index;
  const HandoffRow row = handoff_row(p, s.pair);
  const StoredState* bound = saved_bound(p, s, s.index - 1);
  const result_type value = ((const result_type*)p.value)[s.pair];
  const double grad = (double)gradient_of_value(p, s.pair);
  const real seed = seed_of(value);
  const i32 end = s.is_last ? final_step(s) : -1;
  const Costs costs = open_costs(p, s);
  real left[LANE_ROWS], diagonal[LANE_ROWS], pass[LANE_ROWS];  // what each row's last cell sends on
  UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = diagonal[q] = pass[q] = 0;
  const Strip below = strip_at(p, s, s.index + 1);
  i32 tile_open = s.last_column / 32 + 1;  // tiles from here on are already ours
  if constexpr (MODE == DIRECT) clear_grad_x(p, s);
  for (i32 checkpoint = last_step(s) / CHECKPOINT; checkpoint >= first_checkpoint(s); checkpoint--) {
    const i32 base = checkpoint * CHECKPOINT;
    warp_barrier();
    for (i32 i = lane; i < CHECKPOINT; i += 32) {
      bool there = s.index > 0 && in_band(s, s.first_row - 1, base + i);
      shared.top[i] = there ? bound[base + i] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
    }
    Walker w = load_checkpoint(p, s, checkpoint);
    i32 subwalk = (last_step(s) - base) / SUBWALK;
    if (subwalk > SUBWALKS - 1) subwalk = SUBWALKS - 1;
    warp_barrier();
    for (i32 i = 0; i < subwalk; i++) {
      if (i > 0) store_walker(&shared.states[i - 1], w);
      WideSteps steps{shared.costs, costs, p, s, base + i * SUBWALK, shared.top + i * SUBWALK};
      walk(w, SUBWALK, steps, [](int, const Terms&, real) {}, [](i32) {});
    }
    for (bool resumed = true; subwalk >= 0; subwalk--, resumed = false) {
      const i32 first = base + subwalk * SUBWALK;
      if (!resumed) w = subwalk > 0 ? unpacked(fetch_walker(&shared.states[subwalk - 1])) : load_checkpoint(p, s, checkpoint);
      // Flows of the strip below: its first row is at our last row's column. Loaded here, needed after the walk.
      const i32 flow_column = first + lane - (STRIP_ROWS - 1);
      const bool wanted = lane < SUBWALK && !s.is_last && passes_up(s, s.first_row + STRIP_ROWS, flow_column);
      RowWord ahead{};
      if (wanted) ahead = load_word(row, flow_column);
      WideSteps steps{shared.costs, costs, p, s, first, shared.top + first - base};
      StepShares now;
      walk(w, SUBWALK, steps, [&](int q, const Terms& t, real sum) { now.keep(q, t, sum); }, [&](i32 step) {
        shared.shares[step][lane] = now.shares;
        shared.left[step][lane] = now.left;
      });
      if (wanted && !is_from(ahead, owner_in))
        ahead = await_word(row, flow_column, owner_in, Waiter{"what the strip below passes up", s.pair, s.index});
      if (lane < SUBWALK) shared.flow_in[lane] = wanted ? unpack_flow(ahead) : Flow{};
      if constexpr (MODE == DIRECT) {
        i32 leftmost = (first - (STRIP_ROWS - 1)) / 32;
        if (leftmost < 0) leftmost = 0;
        while (tile_open > leftmost) open_tile(p, s, below, walk_index, --tile_open);
      }
      warp_barrier();
      ActiveCells active = no_active_cells();
      UNROLL_BY(1) for (i32 k = SUBWALK - 1; k >= 0; k--) {
        const i32 step = first + k;
        LaneReals alignments;
        const LaneShares share = shared.shares[k][lane];
        const LaneReals left_share = shared.left[k][lane];
        real passed = from_lane_below(pass[0]);
        if (lane == 31) passed = shared.flow_in[k].pass;
        // Rows in order: row q reads what row q + 1 passed in the step before, which must not be overwritten yet.
        UNROLL for (int q = 0; q < LANE_ROWS; q++) {
          real e = left[q] + (q < LANE_ROWS - 1 ? pass[q + 1 < LANE_ROWS ? q + 1 : q] : passed);
          const i32 own_row = s.first_row + lane * LANE_ROWS + q, column = step - lane * LANE_ROWS - q;
          if (step == end && own_row == s.n - 1) e = seed;
          left[q] = e * left_share.row[q];
          pass_on(e, share.up[q], share.diagonal[q], pass[q], diagonal[q]);
          const bool exists = own_row < s.n && in_band(s, own_row, column);
          if constexpr (MODE == COST_MATRIX) {
            if (exists && e != (real)0)
              store_gradient(p.grad_x, ((i64)s.pair * p.n + own_row) * p.m + column, (result_type)(e * grad), p.grad_x_wide);
          } else {
            alignments.row[q] = exists && !(e < LEAST_WEIGHT) ? e : (real)0;
            if (alignments.row[q] != (real)0) include(active, lane * LANE_ROWS + q, column);
          }
        }
        if constexpr (MODE == DIRECT) shared.left[k][lane] = alignments;  // in place of the shares, which are used
        if (lane == 0) shared.flow_out[k] = Flow{pass[0], 0};
      }
      warp_barrier();
      if constexpr (MODE == DIRECT) {
        active = of_all_lanes(active);
        if (active.last_row >= 0) add_gradients(p, costs, s, shared.left, active, first, SUBWALK, grad);
      }
      for (i32 i = lane; i < SUBWALK; i += 32)
        if (s.index > 0 && passes_up(s, s.first_row, first + i)) store_word(row, first + i, pack_flow(shared.flow_out[i], owner_out));
      if constexpr (MODE == DIRECT)
        if (first % 32 == 0) close_tile(p, s, walk_index, first / 32);
      warp_barrier();
    }
  }
  if constexpr (MODE == DIRECT) store_grad_x(p, s);
}
