// The backward of a strip of univariate series, by one warp.
//
// It takes the checkpoints in reverse; from each it recomputes the shares (7) of SUBWALK steps at a time into shared memory,
// last subwalk first, and sweeps (8) through them in reverse. The gradient of y rides along: each row adds its share to the
// y of its column and passes it up, strip after strip, so the order of that sum is fixed.
//
// E, the alignment weight, is next to nothing but for a neighbourhood of the likely paths, and moves up and left only. So a
// strip begins at the checkpoint in which weight first comes to it, from the right, and ends when all of it has left.
//
//   begins   it looks through the words of the strip below from the right; columns that come without weight are complete,
//            since no strip further up has any there. It publishes its last column, `reach`: it hands on nothing right of it.
//            The first p.start_lag strips begin at their last column.
//   ends     once its own cells have nothing left to pass on, the strip below has ended, and it has come as far as that.
//            Sums of grad_y that are still on their way up are handed on from where they are.
//
// A strip that waits for a word also reads whether the strip below has ended; every strip publishes where it begins and that
// it has ended, whatever comes to it, and stores all words between the two that are read, so nobody waits for ever. Nobody
// stores where somebody is still to read: a strip that stores a word has read its neighbour's there, or that it has ended.
#pragma once

#define SUBWALKS (CHECKPOINT / SUBWALK)
static_assert(SUBWALK <= 32, "one lane has one column of a subwalk");
static_assert(CHECKPOINT % 32 == 0 && SUBWALKS <= 2, "checkpoint inputs are whole columns, and a second walk starts from them");

#define SWEPT_AT_A_TIME 8  // steps whose shares are read before any flow is written
struct alignas(64) BackwardShared {
  LaneShares shares[SUBWALK][32];
#if KEEP_LEFT
  LaneReals left[SUBWALK][32];
#endif
  Flow flow_in[SUBWALK], flow_out[SUBWALK];
  StoredState top[CHECKPOINT];
  float y[STRIP_ROWS + CHECKPOINT];
};
static_assert(sizeof(BackwardShared) == BACKWARD_SHARED, "kernel.py has another size of shared memory");

// What the walk from a checkpoint needs of memory, loaded one checkpoint ahead.
struct CheckpointInputs {
  StoredState top[CHECKPOINT / 32];
  element y[LANE_ROWS + CHECKPOINT / 32];
  FetchedWalker start;
};
DEVICE CheckpointInputs fetch_inputs(const Params& p, const Strip& s, const StoredState* bound, const element* y, i32 checkpoint) {
  CheckpointInputs ahead;
  const i32 column = checkpoint * CHECKPOINT + (i32)lane_index();
  UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) {
    bool there = s.index > 0 && in_band(s, s.first_row - 1, column + i * 32);
    ahead.top[i] = there ? bound[column + i * 32] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
  }
  UNROLL for (int i = 0; i < LANE_ROWS + CHECKPOINT / 32; i++) {
    i32 at = column + (i - LANE_ROWS) * 32;
    ahead.y[i] = y[at < 0 ? 0 : at < s.m ? at : s.m - 1];
  }
  ahead.start = fetch_checkpoint(p, s, checkpoint);
  return ahead;
}

DEVICE void store_grad_y(const Params& p, const Strip& s, i32 column, double grad, float sum) {
  store_gradient(p.grad_y, (i64)s.pair * p.m + column, (result_type)(2.0f * (float)grad * sum), p.grad_y_wide);
}

// The first checkpoint, from the right, in which weight comes to the strip.
DEVICE i32 find_active_checkpoint(const Params& p, const Strip& s, const HandoffRow& row, i32 walk_index, double grad) {
  const i32 reach_below = await_begin(p, s, row, walk_index - 1);
  const u32* end_below = end_of(p, row, walk_index - 1);
  const i32 bottom = s.first_row + STRIP_ROWS - 1;
  i32 checkpoint = last_step(s) / CHECKPOINT;
  if (checkpoint > (reach_below + STRIP_ROWS - 1) / CHECKPOINT) checkpoint = (reach_below + STRIP_ROWS - 1) / CHECKPOINT;
  for (; checkpoint > first_checkpoint(s); checkpoint--) {
    Received from_below[CHECKPOINT / 32];
    bool has_weight = false;
    UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) {
      const i32 column = checkpoint * CHECKPOINT + i * 32 + (i32)lane_index() - (STRIP_ROWS - 1);
      from_below[i] = Received{Flow{0, 0}, false};
      if (column <= reach_below && passes_up(s, bottom + 1, column))
        from_below[i] = await_flow(s, row, column, (u32)(walk_index - 1), end_below);
      has_weight |= !(from_below[i].flow.pass < LEAST_WEIGHT);
    }
    if (any_lane(has_weight)) break;
    UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) {
      const i32 column = checkpoint * CHECKPOINT + i * 32 + (i32)lane_index() - (STRIP_ROWS - 1);
      if (p.grad_y && from_below[i].there && in_band(s, bottom, column)) store_grad_y(p, s, column, grad, from_below[i].flow.y);
    }
  }
  return checkpoint;
}

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
  Costs costs = open_costs(p, s);
  real left[LANE_ROWS], diagonal[LANE_ROWS], pass[LANE_ROWS];  // what each row's last cell sends on
  UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = diagonal[q] = pass[q] = 0;
  const element* y = y_of(p, s);
  real gx[LANE_ROWS], gy[LANE_ROWS];
  UNROLL for (int q = 0; q < LANE_ROWS; q++) gx[q] = gy[q] = 0;
  const float reference = to_float(*x_of(p, s));
  i32 begin = last_step(s) / CHECKPOINT, reach = s.m - 1;
  const bool unpruned = !has_path(value);  // a pair without a path, or poisoned
  const u32* end_below = end_of(p, row, walk_index - 1);
  i32 reach_below = s.m - 1;
  bool received = s.is_last, finished = false;  // whether weight has come; whether it has left again
  if (walk_index >= p.start_lag && !unpruned) {
    begin = find_active_checkpoint(p, s, row, walk_index, grad);
    reach_below = await_begin(p, s, row, walk_index - 1);  // published already
    const i32 last = (begin + 1) * CHECKPOINT - STRIP_ROWS;
    if (last < reach) reach = last;
  }
  if (s.index > 0 && lane == 0) publish_begin(p, row, walk_index, reach);
  CheckpointInputs next = fetch_inputs(p, s, bound, y, begin);
  for (i32 checkpoint = begin; checkpoint >= first_checkpoint(s); checkpoint--) {
    if (finished) break;
    const i32 base = checkpoint * CHECKPOINT;
    warp_barrier();
    const Walker start = walker_of(next.start, s, checkpoint);
    UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) shared.top[i * 32 + lane] = next.top[i];
    UNROLL for (int i = 0; i < LANE_ROWS + CHECKPOINT / 32; i++) {
      i32 column = base + (i - LANE_ROWS) * 32 + lane;
      shared.y[i * 32 + lane] = column >= 0 && column < s.m ? to_float(next.y[i]) : reference;
    }
    const float* y_at = shared.y + STRIP_ROWS - base;
    if (checkpoint > first_checkpoint(s)) next = fetch_inputs(p, s, bound, y, checkpoint - 1);
    i32 subwalk = (last_step(s) - base) / SUBWALK;
    if (subwalk > SUBWALKS - 1) subwalk = SUBWALKS - 1;
    Walker w = start;
    warp_barrier();
    if constexpr (SUBWALKS > 1)
      for (i32 i = 0; i < subwalk; i++) {
        UnivariateSteps steps{costs, s, y_at, base + i * SUBWALK, shared.top + i * SUBWALK};
        steps.seek();
        walk(w, SUBWALK, steps, [](int, const Terms&, real) {}, [](i32) {});
      }
    for (bool resumed = true; subwalk >= 0; subwalk--, resumed = false) {
      const i32 first = base + subwalk * SUBWALK;
      if (!resumed) w = start;
      // Flows of the strip below: its first row is at our last row's column. Loaded here, needed after the walk.
      const i32 flow_column = first + lane - (STRIP_ROWS - 1);
      bool wanted = lane < SUBWALK && !s.is_last && passes_up(s, s.first_row + STRIP_ROWS, flow_column);
      wanted = wanted && flow_column <= reach_below;
      RowWord ahead{};
      if (wanted) ahead = load_word(row, flow_column);
      UnivariateSteps steps{costs, s, y_at, first, shared.top + first - base};
      steps.seek();
      StepShares now;
      walk(w, SUBWALK, steps, [&](int q, const Terms& t, real sum) { now.keep(q, t, sum); }, [&](i32 step) {
        shared.shares[step][lane] = now.shares;
#if KEEP_LEFT
        shared.left[step][lane] = now.left;
#endif
      });
      Flow from_below{0, 0};
      if (wanted) from_below = is_from(ahead, owner_in) ? unpack_flow(ahead) : await_flow(s, row, flow_column, owner_in, end_below).flow;
      if (from_below.pass < LEAST_WEIGHT) from_below.pass = 0;
      received = received || any_lane(from_below.pass != (real)0);
      if (lane < SUBWALK) shared.flow_in[lane] = from_below;
      warp_barrier();
      UNROLL for (int q = 1; q < LANE_ROWS; q++) costs.y[q] = y_at[first + SUBWALK - lane * LANE_ROWS - q];
      auto sweep_part = [&](auto with_end, i32 part) {
        LaneShares shares[SWEPT_AT_A_TIME];
        LaneReals lefts[SWEPT_AT_A_TIME];
        Flow flows[SWEPT_AT_A_TIME];
        UNROLL for (int k = 0; k < SWEPT_AT_A_TIME; k++) {
          shares[k] = shared.shares[part + k][lane];
#if KEEP_LEFT
          lefts[k] = shared.left[part + k][lane];
#endif
          flows[k] = shared.flow_in[part + k];
        }
        float ys[SWEPT_AT_A_TIME];
        UNROLL for (int k = 0; k < SWEPT_AT_A_TIME; k++) ys[k] = y_at[first + part + k - lane * LANE_ROWS - (LANE_ROWS - 1)];
        UNROLL for (i32 k = SWEPT_AT_A_TIME - 1; k >= 0; k--) {
          const i32 step = first + part + k;
          const LaneShares& share = shares[k];
          Flow in{from_lane_below(pass[0]), 0};
          in.y = from_lane_below(gy[0]);
          UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) costs.y[q] = costs.y[q + 1];
          costs.y[LANE_ROWS - 1] = ys[k];
          if (lane == 31) in = flows[k];
          // Rows in order: row q reads what row q + 1 passed in the step before, which must not be overwritten yet.
          UNROLL for (int q = 0; q < LANE_ROWS; q++) {
            real e = left[q] + (q < LANE_ROWS - 1 ? pass[q + 1 < LANE_ROWS ? q + 1 : q] : in.pass);
            if (decltype(with_end)::value && step == end && s.first_row + lane * LANE_ROWS + q == s.n - 1) e = seed;
            left[q] = KEEP_LEFT ? multiply(e, lefts[k].row[q]) : leave_left(e, share.up[q], share.diagonal[q]);
            pass_on(e, share.up[q], share.diagonal[q], pass[q], diagonal[q]);
            real difference = costs.x[q] - costs.y[q];
            gx[q] = multiply_add(e, difference, gx[q]);
            gy[q] = multiply_add(-e, difference, q < LANE_ROWS - 1 ? gy[q + 1 < LANE_ROWS ? q + 1 : q] : in.y);
          }
          if (lane == 0) shared.flow_out[part + k] = Flow{pass[0], gy[0]};
        }
      };
      UNROLL_BY(1) for (i32 part = SUBWALK - SWEPT_AT_A_TIME; part >= 0; part -= SWEPT_AT_A_TIME) {
        if (end >= first + part && end < first + part + SWEPT_AT_A_TIME) sweep_part(Yes{}, part);
        else sweep_part(No{}, part);
      }
      warp_barrier();
      for (i32 i = lane; i < SUBWALK; i += 32) {
        Flow out = shared.flow_out[i];
        i32 column = first + i;
        // The column's sum is complete where the band, or the series, has no row above.
        bool handed_on = s.index > 0 && in_band(s, s.first_row - 1, column);
        if (p.grad_y && !handed_on && column >= s.first_column && column <= s.last_column && column <= reach)
          store_grad_y(p, s, column, grad, out.y);
        if (s.index > 0 && column <= reach && passes_up(s, s.first_row, column)) store_word(row, column, pack_flow(out, owner_out));
      }
      bool has_weight = s.index == 0 || unpruned || !received;  // the first strip has weight in its first column
      UNROLL for (int q = 0; q < LANE_ROWS; q++)
        has_weight |= !(left[q] < LEAST_WEIGHT && diagonal[q] < LEAST_WEIGHT && pass[q] < LEAST_WEIGHT);
      const bool drained = !any_lane(has_weight);
      if (drained)  // whether it ends or not, so that E does not depend on when it reads of the other's end
        UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = diagonal[q] = pass[q] = 0;
      if (drained && first <= (s.is_last ? end : from_lane(peek_end(end_below), 0))) {
        // The sums of grad_y on their way up, each row's of its own column.
        UNROLL for (int q = 0; q < LANE_ROWS; q++) {
          const i32 r = lane * LANE_ROWS + q, column = first - r;
          if (r > 0 && column >= s.first_column && column <= s.last_column && column <= reach) {
            if (in_band(s, s.first_row - 1, column)) store_word(row, column, pack_flow(Flow{0, gy[q]}, owner_out));
            else if (p.grad_y) store_grad_y(p, s, column, grad, gy[q]);
          }
        }
        finished = true;
      }
      if (finished || first <= first_checkpoint(s) * CHECKPOINT) {
        warp_barrier();
        if (s.index > 0 && lane == 0) store_release(end_of(p, row, walk_index), (u32)first);
        if (finished) break;
      }
      warp_barrier();
    }
  }
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    i32 at = s.first_row + lane * LANE_ROWS + q;
    if (p.grad_x && at < s.n)
      store_gradient(p.grad_x, (i64)s.pair * p.n + at, (result_type)(2.0f * (float)grad * gx[q]), p.grad_x_wide);
  }
}
