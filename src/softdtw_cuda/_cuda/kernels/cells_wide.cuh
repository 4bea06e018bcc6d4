// Costs and gradients of wide kernels.
//
//   MODE   COST_MATRIX or DIRECT (any D)
//
// Costs are made for eight steps at a time, by each lane for its own rows, so that their loads wait together.
#pragma once

struct Costs {
  const element* x;
  const element* y;
};
DEVICE Costs open_costs(const Params& p, const Strip& s) {
  return Costs{x_of(p, s), y_of(p, s)};
}

#define COST_STEPS 8
typedef LaneReals CostSteps[COST_STEPS][32];  // of each lane's rows, not read by others
#define LANE_COLUMNS (COST_STEPS + LANE_ROWS - 1)

// COUNT features of a row that begins at a multiple of their size.
template <int COUNT> struct alignas(COUNT * sizeof(element)) FeatureGroup { element v[COUNT]; };
// Adds COUNT features' part of the squared distances. Row q is at step k in column k - q, counted from the lane's first
// column.
template <int COUNT>
DEVICE void add_squares(real (&sum)[COST_STEPS][LANE_ROWS], const element* const (&x)[LANE_ROWS],
                        const element* const (&y)[LANE_COLUMNS], i32 first) {
  FeatureGroup<COUNT> own[LANE_ROWS];
  UNROLL for (int q = 0; q < LANE_ROWS; q++) own[q] = *(const FeatureGroup<COUNT>*)(x[q] + first);
  UNROLL for (int c = 0; c < LANE_COLUMNS; c++) {
    const FeatureGroup<COUNT> other = *(const FeatureGroup<COUNT>*)(y[c] + first);
    UNROLL for (int q = 0; q < LANE_ROWS; q++) {
      const int k = c + q - (LANE_ROWS - 1);
      if (k >= 0 && k < COST_STEPS)
        UNROLL for (int i = 0; i < COUNT; i++) {
          const real difference = (real)to_float(own[q].v[i]) - (real)to_float(other.v[i]);
          sum[k][q] += difference * difference;
        }
    }
  }
}
DEVICE i32 clamped(i32 v, i32 count) { return v < 0 ? 0 : v < count ? v : count - 1; }
// Scaled costs of the lane's cells at steps `first` and on. Cells that do not exist read others, and are forbidden.
DEVICE void make_costs(CostSteps& costs, const Params& p, const Costs& c, const Strip& s, i32 first) {
  const i32 lane = (i32)lane_index(), first_row = s.first_row + lane * LANE_ROWS, first_column = first - lane * LANE_ROWS;
  real sum[COST_STEPS][LANE_ROWS];
  if constexpr (MODE == COST_MATRIX) {
    UNROLL for (int k = 0; k < COST_STEPS; k++)
      UNROLL for (int q = 0; q < LANE_ROWS; q++)
        sum[k][q] = (real)to_float(c.x[(i64)clamped(first_row + q, s.n) * p.m + clamped(first_column + k - q, s.m)]);
  } else {
    UNROLL for (int k = 0; k < COST_STEPS; k++)
      UNROLL for (int q = 0; q < LANE_ROWS; q++) sum[k][q] = 0;
    const element* x[LANE_ROWS];
    const element* y[LANE_COLUMNS];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) x[q] = c.x + (i64)clamped(first_row + q, s.n) * p.d;
    UNROLL for (int i = 0; i < LANE_COLUMNS; i++) y[i] = c.y + (i64)clamped(first_column + i - (LANE_ROWS - 1), s.m) * p.d;
    i32 k = 0;
    if (p.d % 2 == 0 && ((u64)c.x | (u64)c.y) % (2 * sizeof(element)) == 0)
      UNROLL_BY(2) for (; k < p.d; k += 2) add_squares<2>(sum, x, y, k);
    UNROLL_BY(1) for (; k < p.d; k++) add_squares<1>(sum, x, y, k);
  }
  UNROLL for (int k = 0; k < COST_STEPS; k++) {
    LaneReals scaled;
    UNROLL for (int q = 0; q < LANE_ROWS; q++) {
      const bool exists = first_row + q < s.n && in_band(s, first_row + q, first_column + k - q);
      scaled.row[q] = exists ? sum[k][q] * p.scale : (real)2 * FORBIDDEN_FROM;
    }
    costs[k][lane] = scaled;
  }
}

// What the walker needs; see walk().
struct WideSteps {
  CostSteps& made;
  const Costs& own;
  const Params& p;
  const Strip& s;
  i32 start;  // the step of the stretch's first
  const StoredState* above;
  struct Eight {};
  METHOD void seek() {}
  METHOD Eight read(i32 first) const {
    make_costs(made, p, own, s, start + first);
    return Eight{};
  }
  METHOD void costs(real (&cost)[LANE_ROWS], const Eight&, i32, i32 k) const {
    const LaneReals scaled = made[k][lane_index()];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) cost[q] = scaled.row[q];
  }
  METHOD const StoredState& top(const Eight&, i32 first, i32 k) const { return above[first + k]; }
};

// Weight below this adds nothing to a gradient: that of every row and column is 1 or more. NaN is not below it.
#define LEAST_WEIGHT 7.888609052210118e-31  // 2^-100

// E of some steps, kept by [step][lane], zero where it adds nothing; and the rows and columns of what is not zero.
typedef LaneReals Alignments[32];
struct ActiveCells { i32 first_row, last_row, first_column, last_column; };  // rows counted from the strip's first
DEVICE real alignment_at(const Alignments* e, i32 step, i32 row) { return e[step][row / LANE_ROWS].row[row % LANE_ROWS]; }
DEVICE ActiveCells no_active_cells() { return ActiveCells{STRIP_ROWS, -1, 0x7fffffff, -1}; }
DEVICE void include(ActiveCells& cells, i32 row, i32 column) {
  cells.first_row = min(cells.first_row, row);
  cells.last_row = max(cells.last_row, row);
  cells.first_column = min(cells.first_column, column);
  cells.last_column = max(cells.last_column, column);
}
DEVICE ActiveCells of_all_lanes(ActiveCells cells) {
  for (u32 mask = 16; mask; mask /= 2) {
    cells.first_row = min(cells.first_row, from_lane_xor(cells.first_row, mask));
    cells.last_row = max(cells.last_row, from_lane_xor(cells.last_row, mask));
    cells.first_column = min(cells.first_column, from_lane_xor(cells.first_column, mask));
    cells.last_column = max(cells.last_column, from_lane_xor(cells.last_column, mask));
  }
  return cells;
}
// Calls each(row, feature) for `rows` rows of d features, one after the other over the lanes.
template <class Each> DEVICE void for_each_feature(i32 rows, i32 d, Each each) {
  const i32 lane = (i32)lane_index(), more_rows = 32 / d, more = 32 % d;
  for (i32 row = lane / d, k = lane % d; row < rows; row += more_rows, k += more) {
    if (k >= d) {
      k -= d;
      if (++row >= rows) break;
    }
    each(row, k);
  }
}
// Adds the part of `steps` steps from `first` on to the gradients: 2 grad E_ij (x_i - y_j). A lane sums one feature of a row,
// or of a column, at a time, last step first. Rows are this strip's alone; columns are touched by one strip at a time,
// because strips add in order.
DEVICE void add_gradients(const Params& p, const Costs& c, const Strip& s, const Alignments* e, const ActiveCells& cells, i32 first,
                          i32 steps, double grad) {
  auto weighted = [&](i32 step, i32 row, i32 column, i32 k) {
    const real weight = alignment_at(e, step, row);
    if (weight == (real)0) return (real)0;
    const element *x = c.x + (i64)(s.first_row + row) * p.d, *y = c.y + (i64)column * p.d;
    return weight * ((real)to_float(x[k]) - (real)to_float(y[k]));
  };
  if (p.grad_x)
    for_each_feature(cells.last_row - cells.first_row + 1, p.d, [&](i32 i, i32 k) {
      const i32 row = cells.first_row + i;
      double sum = 0;
      for (i32 step = steps - 1; step >= 0; step--) sum += weighted(step, row, first + step - row, k);
      result_type* gx = (result_type*)p.sum_x + ((i64)s.pair * p.n + s.first_row + row) * p.d + k;
      *gx = (result_type)((double)*gx + 2.0 * grad * sum);
    });
  if (p.grad_y)
    for_each_feature(cells.last_column - cells.first_column + 1, p.d, [&](i32 i, i32 k) {
      const i32 column = cells.first_column + i;
      result_type* gy = (result_type*)p.sum_y + ((i64)s.pair * p.m + column) * p.d + k;
      const double before = (double)load_fresh(gy);
      double sum = 0;
      for (i32 step = steps - 1; step >= 0; step--) {
        const i32 row = first + step - column;
        if (row >= 0 && row < STRIP_ROWS) sum += weighted(step, row, column, k);
      }
      *gy = (result_type)(before - 2.0 * grad * sum);
    });
}
DEVICE bool touches(const Strip& s, i32 tile) { return tile >= s.first_column / 32 && tile <= s.last_column / 32; }
// A strip may add to a tile of grad_y once the strip below it is done with it; the first to come clears it.
DEVICE void open_tile(const Params& p, const Strip& s, const Strip& below, i32 walk_index, i32 tile) {
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
DEVICE void close_tile(const Params& p, const Strip& s, i32 walk_index, i32 tile) {
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
