// The backward of one pair by one warp, from its last strip to its first.
//
//   gX_i = 2 g sum_j E_ij (x_i - y_j)      gY_j = -2 g sum_i E_ij (x_i - y_j)
//
// 32 steps at a time from right to left: they are recomputed, which leaves the shares (7) in shared memory, and (8) is swept
// through them in reverse. gY of a column moves up with the rows, each adding its part, and is complete for the strip when it
// leaves the first row; strips add theirs to memory from the last to the first. What a strip passes up to the next goes
// through a row of floats in memory.
//
// Pruning: E is next to nothing but for a neighbourhood of the likely paths, and moves up and left only. A strip begins
// where the first weight of LEAST_WEIGHT or more comes from the strip below, and ends when it has passed on all of it.
#pragma once

struct alignas(64) BackwardShared {
  LaneShares shares[32][32];
  Window y;
  Vector grad_y[VECTORS][32];  // of the columns that leave the strip's first row
  StoredState top[32];
  float passed_in[32], passed_out[32];
};
// What the rows' last cells send on, and the sums of gradients.
struct Sweep : Outflow { Point grad_x[LANE_ROWS], grad_y[LANE_ROWS]; };
DEVICE void clear(Point& f) { UNROLL for (int k = 0; k < DIMS; k++) f.v[k] = 0.0f; }

// Adds to a column's sum in memory; of two lanes' columns none is the same.
DEVICE void add_grad_y(const Params& p, const Strip& s, i32 column, float factor, const Point& sum) {
  if (!p.grad_y || column < 0 || column >= s.m) return;
  float* to = (float*)p.sum_y + ((i64)s.pair * p.m + column) * p.d;
  UNROLL for (int k = 0; k < DIMS; k++)
    if (k < p.d) to[k] = multiply_add(factor, sum.v[k], to[k]);
}

// Sweeps (8) through the 32 steps from `base` on, last step first. `end`: the step, if it is among these, at which the pair's
// last cell has its weight, `seed`.
DEVICE void sweep_chunk(Sweep& sweep, LaneSeries& own, BackwardShared& shared, const Strip& s, i32 base, i32 end, float seed) {
  const i32 lane = (i32)lane_index();
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) own.y[q + 1] = features_at(shared.y, base + 32 - lane * LANE_ROWS - q - 1);
  auto sweep_steps = [&](auto with_end, i32 first) {
    LaneShares shares[PAIR_STEPS];
    float in[PAIR_STEPS];
    Point entering[PAIR_STEPS];
    UNROLL for (int k = 0; k < PAIR_STEPS; k++) {
      shares[k] = shared.shares[first + k][lane];
      in[k] = shared.passed_in[first + k];
      entering[k] = features_at(shared.y, base + first + k - lane * LANE_ROWS - (LANE_ROWS - 1));
    }
    UNROLL for (i32 k = PAIR_STEPS - 1; k >= 0; k--) {
      const LaneShares& share = shares[k];
      float passed = from_lane_below(sweep.pass[0]);
      Point sum;  // of the row below, for the last row
      UNROLL for (int i = 0; i < DIMS; i++) sum.v[i] = from_lane_below(sweep.grad_y[0].v[i]);
      if (lane == 31) {
        passed = in[k];
        clear(sum);
      }
      // The last row comes to a new column, and the others to where the row below them was.
      UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) own.y[q] = own.y[q + 1];
      own.y[LANE_ROWS - 1] = entering[k];
      // Rows in order: row q reads what row q + 1 passed in the step before, which must not be overwritten yet.
      UNROLL for (int q = 0; q < LANE_ROWS; q++) {
        float e = sweep.left[q] + (q + 1 < LANE_ROWS ? sweep.pass[q + 1 < LANE_ROWS ? q + 1 : q] : passed);
        if (decltype(with_end)::value && base + first + k == end && s.first_row + lane * LANE_ROWS + q == s.n - 1) e = seed;
        sweep.left[q] = leave_left(e, share.up[q], share.diagonal[q]);
        pass_on(e, share.up[q], share.diagonal[q], sweep.pass[q], sweep.diagonal[q]);
        UNROLL for (int i = 0; i < DIMS; i++) {
          const float difference = own.x[q].v[i] - own.y[q].v[i];
          sweep.grad_x[q].v[i] = multiply_add(e, difference, sweep.grad_x[q].v[i]);
          const float below = q + 1 < LANE_ROWS ? sweep.grad_y[q + 1 < LANE_ROWS ? q + 1 : q].v[i] : sum.v[i];
          sweep.grad_y[q].v[i] = multiply_add(-e, difference, below);
        }
      }
      if (lane == 0) {
        shared.passed_out[first + k] = sweep.pass[0];
        UNROLL for (int i = 0; i < VECTORS; i++) {
          Vector part;
          UNROLL for (int j = 0; j < VECTOR; j++) part.v[j] = sweep.grad_y[0].v[i * VECTOR + j];
          shared.grad_y[i][first + k] = part;
        }
      }
    }
  };
  UNROLL_BY(1) for (i32 first = 32 - PAIR_STEPS; first >= 0; first -= PAIR_STEPS) {
    if (end >= base + first && end < base + first + PAIR_STEPS) sweep_steps(Yes{}, first);
    else sweep_steps(No{}, first);
  }
}

// Returns the columns at which the strip passes weight up.
DEVICE Range backward_strip(const Params& p, const Strip& s, const Range& received, float seed, float factor,
                            BackwardShared& shared) {
  const i32 lane = (i32)lane_index();
  const StoredState* bound = saved_bound(p, s, s.index - 1);
  float* row = (float*)(p.rows + s.pair * p.row_bytes);
  LaneSeries own;
  read_rows(own, p, s);
  Sweep sweep;
  clear_weight(sweep);
  UNROLL for (int q = 0; q < LANE_ROWS; q++) { clear(sweep.grad_x[q]); clear(sweep.grad_y[q]); }
  const i32 end = s.is_last ? final_step(s) : -1;
  const i32 start = first_weight(s, received);
  Range passed{s.m, -1};
  bool riding = false;  // whether sums of grad_y are on their way up
  i32 filled = (start / 32 + 1) * 32;  // columns from here on are in the window
  UNROLL_BY(1) for (i32 base = start / 32 * 32; base >= 0; base -= 32) {
    const float from_below = weight_from_below(s, row, received, base);
    const bool at_end = end >= base && end < base + 32;
    if (!at_end && !any_lane(from_below != 0.0f || has_weight(sweep))) {
      if (riding) {
        // The sums on their way up, each row's of its own column: that of the step after this chunk's last.
        UNROLL for (int q = 0; q < LANE_ROWS; q++) {
          const i32 r = lane * LANE_ROWS + q;
          if (r > 0) add_grad_y(p, s, base + 32 - r, factor, sweep.grad_y[q]);
          clear(sweep.grad_y[q]);
        }
        clear_weight(sweep);
        riding = false;
        warp_barrier();
      }
      if (s.is_last ? base < end : base - STRIP_ROWS < received.first) break;
      if (s.index > 0 && base + lane < s.m) row[base + lane] = 0.0f;
      passed.first = base;
      continue;
    }
    riding = true;
    warp_barrier();
    while (filled > base - STRIP_ROWS) {
      filled -= 32;
      put_features(shared.y, filled + lane, read_features(y_of(p, s), filled + lane, s.m, p.d));
    }
    shared.passed_in[lane] = from_below;
    shared.top[lane] = row_above(bound, s, base + lane);
    Walker w = load_checkpoint(p, s, base / 32);
    warp_barrier();
    LaneShares rows;
    FeatureSteps steps{own, shared.y, base, shared.top, (float)p.scale};
    steps.seek();
    walk<PAIR_STEPS>(w, 32, steps,
                     [&](int q, const Terms& t, real sum) {
                       const Shares share = shares_of(t, sum);
                       rows.up[q] = share.up;
                       rows.diagonal[q] = share.diagonal;
                     },
                     [&](i32 k) { shared.shares[k][lane] = rows; });
    warp_barrier();
    sweep_chunk(sweep, own, shared, s, base, end, seed);
    warp_barrier();
    const i32 column = base + lane;
    Point sum;
    UNROLL for (int i = 0; i < VECTORS; i++) {
      const Vector part = shared.grad_y[i][lane];
      UNROLL for (int j = 0; j < VECTOR; j++) sum.v[i * VECTOR + j] = part.v[j];
    }
    add_grad_y(p, s, column, factor, sum);
    if (s.index > 0 && column < s.m) row[column] = shared.passed_out[lane];
    const u32 some = lanes_where(column < s.m && !(shared.passed_out[lane] < LEAST_WEIGHT));
    if (some && passed.last < 0) passed.last = base + highest_bit(some);
    passed.first = base;
  }
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    const i32 r = s.first_row + lane * LANE_ROWS + q;
    if (p.grad_x && r < s.n)
      UNROLL for (int k = 0; k < DIMS; k++)
        if (k < p.d) store_gradient(p.grad_x, ((i64)s.pair * p.n + r) * p.d + k, factor * sweep.grad_x[q].v[k], p.grad_x_wide);
  }
  return passed;
}

static_assert(sizeof(BackwardShared) == BACKWARD_SHARED, "kernel.py has another size of shared memory");
