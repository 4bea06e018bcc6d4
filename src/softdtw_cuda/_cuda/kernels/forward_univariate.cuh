// The forward of a strip of univariate series, by one warp.
#pragma once

struct alignas(64) ForwardShared {
  StoredState top[32], bottom[32];
  float y[STRIP_ROWS + 32];  // the columns that a chunk can touch
};
static_assert(sizeof(ForwardShared) == FORWARD_SHARED, "kernel.py has another size of shared memory");

DEVICE void forward_strip(const Params& p, const Strip& s, ForwardShared& shared) {
  const i32 lane = (i32)lane_index();
  ForwardWalk f = open_forward(p, s);
  Costs costs = open_costs(p, s);
  const element* y = y_of(p, s);
  const float reference = to_float(*x_of(p, s));
  bool bad = false;
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    bad |= s.first_row + lane * LANE_ROWS + q < s.n && out_of_range(costs.x[q], reference, costs.scale);
  for (i32 i = lane; i < STRIP_ROWS + 32; i += 32) shared.y[i] = reference;
  const i32 start = first_checkpoint(s) * CHECKPOINT;
  load_row_above(f, s, start);
  element next_y = y[start + lane < s.m ? start + lane : s.m - 1];  // loaded ahead, as the row above is
  for (i32 base = start; base <= last_step(s); base += 32) {
    warp_barrier();
    // Slide the window of y by 32 columns; shared.y[STRIP_ROWS] is column `base`.
    UNROLL for (int i = 0; i < LANE_ROWS; i++) {
      float moved = shared.y[i * 32 + 32 + lane];
      warp_barrier();
      shared.y[i * 32 + lane] = moved;
    }
    float entering = base + lane < s.m ? to_float(next_y) : reference;
    next_y = y[base + 32 + lane < s.m ? base + 32 + lane : s.m - 1];
    bad |= out_of_range(entering, reference, costs.scale);
    shared.y[STRIP_ROWS + lane] = entering;
    warp_barrier();
    if (base % CHECKPOINT == 0) save_checkpoint(p, s, base / CHECKPOINT, f.walker);
    walk_chunk(f, p, s, base, shared.top, shared.bottom, UnivariateSteps{costs, s, shared.y + STRIP_ROWS - base, base, shared.top});
  }
  store_value(f, p, s);
  if (bad) flag_out_of_range(p, s.pair);
}
