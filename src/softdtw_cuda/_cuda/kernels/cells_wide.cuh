// Costs and gradients of wide kernels, cell by cell from memory: rare enough that this is fine.
//
//   MODE   COST_MATRIX or DIRECT (any D)
#pragma once

struct Costs {
  const element* x;
  const element* y;
};
DEVICE Costs open_costs(const Params& p, const Strip& s) {
  return Costs{x_of(p, s), y_of(p, s)};
}
DEVICE_CALL real distance(const element* x, const element* y, i32 d) {
  real sum = 0;
  for (i32 k = 0; k < d; k++) {
    real difference = (real)to_float(x[k]) - (real)to_float(y[k]);
    sum += difference * difference;
  }
  return sum;
}
DEVICE real scaled_cost(const Params& p, const Costs& c, const Strip& s, i32 row, i32 column) {
  if (row >= s.n || !in_band(s, row, column)) return (real)2 * FORBIDDEN_FROM;
  if constexpr (MODE == COST_MATRIX) return (real)to_float(c.x[(i64)row * p.m + column]) * p.scale;
  else return distance(c.x + (i64)row * p.d, c.y + (i64)column * p.d, p.d) * p.scale;
}

// What the walker needs; see walk(). Steps are not unrolled and read as they go.
struct WideSteps {
  const Costs& own;
  const Params& p;
  const Strip& s;
  i32 start;  // the step of the stretch's first
  const StoredState* above;
  struct Eight {};
  METHOD void seek() {}
  METHOD Eight read(i32) const { return Eight{}; }
  METHOD void costs(real (&cost)[LANE_ROWS], const Eight&, i32 first, i32 k) const {
    UNROLL for (int q = 0; q < LANE_ROWS; q++) {
      i32 row = (i32)lane_index() * LANE_ROWS + q;
      cost[q] = scaled_cost(p, own, s, s.first_row + row, start + first + k - row);
    }
  }
  METHOD const StoredState& top(const Eight&, i32 first, i32 k) const { return above[first + k]; }
};

// Adds E_ij's part of the gradients, x_i and y_j known by row and column. Row i is this lane's alone; column j is
// touched by one lane per step, and by one strip at a time because strips add in order.
DEVICE void add_gradient(const Params& p, const Costs& c, const Strip& s, i32 row, i32 column, double share) {
  const element* x = c.x + (i64)row * p.d;
  const element* y = c.y + (i64)column * p.d;
  result_type* gx = (result_type*)p.sum_x + ((i64)s.pair * p.n + row) * p.d;
  result_type* gy = (result_type*)p.sum_y + ((i64)s.pair * p.m + column) * p.d;
  for (i32 k = 0; k < p.d; k++) {
    double part = 2.0 * share * ((double)to_float(x[k]) - (double)to_float(y[k]));
    if (p.grad_x) gx[k] = (result_type)((double)gx[k] + part);
    if (p.grad_y) gy[k] = (result_type)((double)load_fresh(gy + k) - part);
  }
}
DEVICE bool touches(const Strip& s, i32 tile) { return tile >= s.first_column / 32 && tile <= s.last_column / 32; }
// A strip may add to a tile of grad_y once the strip below it is done with it; the first to come clears it.
DEVICE void await_order(const Params& p, const Strip& s, const Strip& below, i32 walk_index, i32 tile) {
  if (!p.grad_y || tile < 0 || !touches(s, tile)) return;
  if (!s.is_last && touches(below, tile)) {
    Poll poll(Waiter{"the strip below to add to a tile of grad_y", s.pair, s.index}, walk_index - 1, tile);
    if (lane_index() == 0)
      while (load_acquire(&p.grad_y_order[(i64)s.pair * p.tiles + tile]) != (u32)(walk_index - 1)) poll.failed();
  } else {
    result_type* gy = (result_type*)p.sum_y + ((i64)s.pair * p.m + tile * 32) * p.d;
    i64 columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32;
    for (i64 i = lane_index(); i < columns * p.d; i += 32) gy[i] = 0;
  }
  warp_barrier();
}
DEVICE void publish_order(const Params& p, const Strip& s, i32 walk_index, i32 tile) {
  if (!p.grad_y || tile < 0 || !touches(s, tile)) return;
  warp_barrier();
  if (s.index > 0 && touches(strip_at(p, s, s.index - 1), tile)) {
    if (lane_index() == 0) store_release(&p.grad_y_order[(i64)s.pair * p.tiles + tile], (u32)walk_index);
  } else if (p.grad_y != p.sum_y) {  // the last strip to add: the sums are final
    i64 at = ((i64)s.pair * p.m + tile * 32) * p.d;
    i64 columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32;
    for (i64 i = lane_index(); i < columns * p.d; i += 32)
      store_gradient(p.grad_y, at + i, load_fresh((result_type*)p.sum_y + at + i), p.grad_y_wide);
  }
}
// The strip's rows of grad_x, before anything is added to them and when all is.
DEVICE void clear_grad_x(const Params& p, const Strip& s) {
  if (p.grad_x)
    for (i32 q = 0; q < STRIP_ROWS; q++)
      if (s.first_row + q < s.n)
        for (i32 k = (i32)lane_index(); k < p.d; k += 32) ((result_type*)p.sum_x)[((i64)s.pair * p.n + s.first_row + q) * p.d + k] = 0;
  warp_barrier();
}
DEVICE void store_grad_x(const Params& p, const Strip& s) {
  warp_barrier();
  if (p.grad_x && p.grad_x != p.sum_x)
    for (i32 q = 0; q < STRIP_ROWS; q++)
      if (s.first_row + q < s.n)
        for (i32 k = (i32)lane_index(); k < p.d; k += 32) {
          i64 at = ((i64)s.pair * p.n + s.first_row + q) * p.d + k;
          store_gradient(p.grad_x, at, ((result_type*)p.sum_x)[at], p.grad_x_wide);
        }
}
