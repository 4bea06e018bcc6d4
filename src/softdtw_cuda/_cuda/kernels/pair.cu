// Soft-DTW of many pairs of few features: one warp walks one whole pair, strip after strip, so that nothing is handed
// from block to block and no warp ever waits. inline.cu explains the walk; recurrence.cuh and walker.cuh have its steps.
//
//   (5, 6)  Z_ij = w_ij (Z_{i-1,j-1} + Z_{i-1,j} + Z_{i,j-1}),   Z_00 = 1
//   (8)     E_ij = E_{i+1,j} p_up(i+1,j) + E_{i,j+1} p_left(i,j+1) + E_{i+1,j+1} p_diag(i+1,j+1),   E_NM = 1
//   gX_i = 2 g sum_j E_ij (x_i - y_j)      gY_j = -2 g sum_i E_ij (x_i - y_j)
//
// A lane has LANE_ROWS rows of the strip with their features and their gX in registers. The columns of y that 32 steps
// touch are in shared memory. gY of a column moves up with the rows, each adding its part, and is complete for the strip
// when it leaves the first row; strips add theirs to memory from the last to the first. Every order is fixed.
//
// The forward saves the lanes' state every 32 steps and each strip's bottom row, from where the next strip reads it. The
// backward takes 32 steps at a time from right to left: it recomputes them, which leaves the shares (7) in shared memory,
// and sweeps (8) through them in reverse. What a strip passes up to the next goes through a row of floats in memory.
//
// Pruning: E is next to nothing but for a neighbourhood of the likely paths, and moves up and left only. A strip begins
// where the first weight of LEAST_MASS or more comes from the strip below, and ends when it has passed on all of it.
//
//   DIMS   features, padded to 2, 4, 8 or 16 with zeros
#include "primitives.cuh"
#include "recurrence.cuh"
#include "walker.cuh"

static_assert(!WIDE && !BANDED && CHECKPOINT == 32, "other calls have other kernels");

#define VECTOR (DIMS < 4 ? DIMS : 4)
#define VECTORS (DIMS / VECTOR)
#define WINDOW 128  // columns of y in shared memory: a power of two, and at least what 32 steps touch
static_assert(WINDOW >= STRIP_ROWS + 32, "the window is too short");
// Steps that are unrolled; more take more registers than they gain. (Forward + backward on an H200, 16384 pairs of 128
// steps, 2, 4 and 8 of them: D = 2 182, 189, 192 Gcells/s; D = 8 109, 112, 109; D = 16 65, 67, 45.)
#define STEPS (DIMS <= 4 ? 8 : 4)
// Warps that a processor is to hold; others from 8 to 24 and 6 to 12 were within 3 %, or spilled.
#define FORWARD_BLOCKS 16
#define BACKWARD_BLOCKS 8

struct alignas(4 * VECTOR) Vector { float v[VECTOR]; };
typedef Vector Window[VECTORS][WINDOW];
struct Features { float v[DIMS]; };

// Lanes are LANE_ROWS columns apart: even and odd columns lie apart, so that no two lanes meet in a bank.
DEVICE i32 place_of(i32 column) {
  const u32 c = (u32)column & (WINDOW - 1);
  return (i32)(LANE_ROWS == 2 ? (c >> 1) | (c & 1u) * (WINDOW / 2) : c);
}
DEVICE Features features_at(const Window& window, i32 column) {
  Features y;
  UNROLL for (int i = 0; i < VECTORS; i++) {
    const Vector part = window[i][place_of(column)];
    UNROLL for (int k = 0; k < VECTOR; k++) y.v[i * VECTOR + k] = part.v[k];
  }
  return y;
}
DEVICE void put_features(Window& window, i32 column, const Features& y) {
  UNROLL for (int i = 0; i < VECTORS; i++) {
    Vector part;
    UNROLL for (int k = 0; k < VECTOR; k++) part.v[k] = y.v[i * VECTOR + k];
    window[i][place_of(column)] = part;
  }
}
// Row `row` of a series of `count` rows; rows outside repeat the nearest, so that their costs stay in range, though no
// path goes through them.
DEVICE Features read_features(const element* series, i32 row, i32 count, i32 d) {
  const element* from = series + (i64)(row < 0 ? 0 : row < count ? row : count - 1) * d;
  Features f;
  UNROLL for (int k = 0; k < DIMS; k++) f.v[k] = k < d ? to_float(from[k]) : 0.0f;
  return f;
}
DEVICE float squared_distance(const Features& x, const Features& y) {
  constexpr int SUMS = DIMS <= 4 ? 1 : 4;  // of many features, which keeps more digits than one after the other
  float sum[SUMS];
  UNROLL for (int k = 0; k < DIMS; k++) {
    const float difference = x.v[k] - y.v[k];
    sum[k % SUMS] = k < SUMS ? difference * difference : multiply_add(difference, difference, sum[k % SUMS]);
  }
  if constexpr (SUMS == 4) return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  else return sum[0];
}
// The rounding of (6) needs s < 2^21, which holds where x and y are both within 724 / sqrt(scale) of one point.
DEVICE bool out_of_range(const Features& v, const Features& reference, float scale) {
  return !(squared_distance(v, reference) * scale < 524288.0f);
}

// What a pair has in memory.
struct Series {
  const element *x, *y;
  i32 d;
  float scale;
};
DEVICE Series series_of(const Params& p, i32 pair) {
  return Series{(const element*)p.x + pair * p.x_stride, (const element*)p.y + pair * p.y_stride, p.d, (float)p.scale};
}

// The lane's rows, and the columns that they are at.
struct LaneSeries { Features x[LANE_ROWS], y[LANE_ROWS]; };
DEVICE void read_rows(LaneSeries& own, const Series& series, const Strip& s) {
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    own.x[q] = read_features(series.x, s.first_row + (i32)lane_index() * LANE_ROWS + q, s.n, series.d);
}
// To the step before `step`: the columns of all rows but the last.
DEVICE void seek(LaneSeries& own, const Window& window, i32 step) {
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) own.y[q] = features_at(window, step - 1 - (i32)lane_index() * LANE_ROWS - q);
}
// One step on: the first row comes to a new column, and the others to where the row above them was.
DEVICE void step_costs(real (&cost)[LANE_ROWS], LaneSeries& own, const Features& entering, float scale) {
  UNROLL for (int q = LANE_ROWS - 1; q > 0; q--) own.y[q] = own.y[q - 1];
  own.y[0] = entering;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) cost[q] = squared_distance(own.x[q], own.y[q]) * scale;
}

// Walks 32 steps from `base` and calls keep(step, row, terms, sum) for every cell and done(step) after each step.
template <class Keep, class Done>
DEVICE void walk_chunk(Walker& w, LaneSeries& own, const Window& window, const StoredState* top, i32 base, float scale, Keep keep, Done done) {
  seek(own, window, base);
  UNROLL_BY(1) for (i32 first = 0; first < 32; first += STEPS) {
    Features entering[STEPS];
    StoredState above[STEPS];
    UNROLL for (int k = 0; k < STEPS; k++) entering[k] = features_at(window, base + first + k - (i32)lane_index() * LANE_ROWS);
    UNROLL for (int k = 0; k < STEPS; k++) above[k] = top[first + k];
    UNROLL for (int k = 0; k < STEPS; k++) {
      real cost[LANE_ROWS];
      step_costs(cost, own, entering[k], scale);
      advance(w, cost, above[k], [&](int q, const Terms& t, real sum) { keep(first + k, q, t, sum); });
      done(first + k);
    }
    if ((first + STEPS) % 16 == 0) renormalize(w);
  }
}
// The row above the strip at the columns of a chunk.
DEVICE StoredState row_above(const StoredState* bound, const Strip& s, i32 column) {
  return s.index > 0 && column < s.m ? bound[column] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
}
DEVICE void report(const Params& p, i32 pair, bool bad) {
  if (bad) { clear_bits(&p.health[pair], 1u); clear_bits(&p.health[p.batch], 1u); }
}

// These kernels take no tickets, but the wide rerun that follows them does.
DEVICE void ready_rerun(const Params& p, i32 pair) {
  if (pair == 0 && lane_index() == 0) *p.other_tickets = ~0u;
}

// ---- forward
struct alignas(64) ForwardShared {
  Window y;
  StoredState top[32], bottom[32];
};
// Strip `index`'s bottom row: saved, or in the pair's row of scratch, where a column is read 32 columns before it is written.
DEVICE StoredState* bottom_row(const Params& p, const Strip& s, i32 index) {
  return p.save ? saved_bound(p, s, index) : (StoredState*)(p.rows + s.pair * p.row_bytes);
}

DEVICE void forward_strip(const Params& p, const Strip& s, const Series& series, const Features& reference, ForwardShared& shared, bool& bad) {
  const i32 lane = (i32)lane_index();
  LaneSeries own;
  read_rows(own, series, s);
  UNROLL for (int q = 0; q < LANE_ROWS; q++) bad |= out_of_range(own.x[q], reference, series.scale);
  const StoredState* above = bottom_row(p, s, s.index - 1);
  StoredState* below = bottom_row(p, s, s.index);
  Walker w = first_walker(s);
  const i32 end = s.is_last ? final_step(s) : -1, leaving = s.n - 1 - s.first_row;
  UNROLL_BY(1) for (i32 base = 0; base <= last_step(s); base += 32) {
    const Features entering = read_features(series.y, base + lane, s.m, series.d);
    bad |= out_of_range(entering, reference, series.scale);
    warp_barrier();
    put_features(shared.y, base + lane, entering);
    shared.top[lane] = row_above(above, s, base + lane);
    keep_walker(p, s, base / 32, w);
    warp_barrier();
    auto walk = [&](auto last_strip) {
      walk_chunk(w, own, shared.y, shared.top, base, series.scale, [](i32, int, const Terms&, real) {}, [&](i32 k) {
        // The row that leaves the strip: the bottom one for the next strip, or the pair's last for its result.
        if (decltype(last_strip)::value) {
          if (lane == leaving / LANE_ROWS) shared.bottom[k] = row_of(w, leaving % LANE_ROWS);
        } else {
          if (lane == 31) shared.bottom[k] = row_of(w, LANE_ROWS - 1);
        }
      });
    };
    if (s.is_last) walk(Yes{});
    else walk(No{});
    warp_barrier();
    const i32 column = base + lane - (STRIP_ROWS - 1);
    if (!s.is_last && column >= 0 && column < s.m) below[column] = shared.bottom[lane];
    if (end >= base && end < base + 32 && lane == 0) {
      const StoredState z = shared.bottom[end - base];
      ((result_type*)p.value)[s.pair] = (result_type)(((double)z.n - log2_exact((double)z.f)) * p.unscale);
      bad |= z.n >= 1 << 29;
    }
  }
}

static_assert(sizeof(ForwardShared) <= FORWARD_SHARED, "the launcher asks for too little shared memory");
#if HAS_FORWARD
KERNEL THREADS_PER_BLOCK(32, FORWARD_BLOCKS) pair_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  ForwardShared& shared = *(ForwardShared*)memory;
  const i32 pair = (i32)block_index();
  ready_rerun(p, pair);
  const Strip first = strip_of(p, pair, 0);
  if (!first.valid) {
    if (lane_index() == 0) ((result_type*)p.value)[pair] = float_of(0x7fc00000u);
    return;
  }
  const Series series = series_of(p, pair);
  const Features reference = read_features(series.x, 0, first.n, series.d);
  // Columns left of the first: as good as any, but for their range.
  UNROLL for (int i = 0; i < WINDOW / 32; i++) put_features(shared.y, i * 32 + (i32)lane_index(), reference);
  bool bad = false;
  for (i32 index = 0; index * STRIP_ROWS < first.n; index++) {
    warp_barrier();
    forward_strip(p, strip_of(p, pair, index), series, reference, shared, bad);
  }
  report(p, pair, bad);
}
#endif

// ---- backward
struct alignas(8 * LANE_ROWS) LaneShares { float up[LANE_ROWS], diagonal[LANE_ROWS]; };  // the left share is what these leave
struct alignas(64) BackwardShared {
  LaneShares shares[32][32];
  Window y;
  Vector grad_y[VECTORS][32];  // of the columns that leave the strip's first row
  StoredState top[32];
  float passed_in[32], passed_out[32];
};
// What the rows' last cells send on, and the sums of gradients.
struct Sweep {
  float left[LANE_ROWS], diagonal[LANE_ROWS], pass[LANE_ROWS];
  Features grad_x[LANE_ROWS], grad_y[LANE_ROWS];
};
DEVICE void clear(Features& f) { UNROLL for (int k = 0; k < DIMS; k++) f.v[k] = 0.0f; }
DEVICE void clear_weight(Sweep& sweep) { UNROLL for (int q = 0; q < LANE_ROWS; q++) sweep.left[q] = sweep.diagonal[q] = sweep.pass[q] = 0.0f; }
DEVICE bool has_weight(const Sweep& sweep) {
  bool some = false;
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    some |= !(sweep.left[q] < LEAST_MASS && sweep.diagonal[q] < LEAST_MASS && sweep.pass[q] < LEAST_MASS);
  return some;
}
// Columns whose weight the strip below has stored: none at first.
struct Range { i32 first, last; };

// Adds to a column's sum in memory; of two lanes' columns none is the same.
DEVICE void add_grad_y(const Params& p, const Strip& s, i32 column, float factor, const Features& sum) {
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
    LaneShares shares[STEPS];
    float in[STEPS];
    Features entering[STEPS];
    UNROLL for (int k = 0; k < STEPS; k++) {
      shares[k] = shared.shares[first + k][lane];
      in[k] = shared.passed_in[first + k];
      entering[k] = features_at(shared.y, base + first + k - lane * LANE_ROWS - (LANE_ROWS - 1));
    }
    UNROLL for (i32 k = STEPS - 1; k >= 0; k--) {
      const LaneShares& share = shares[k];
      float passed = from_lane_below(sweep.pass[0]);
      Features sum;  // of the row below, for the last row
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
        const float up = e * share.up[q], along = e * share.diagonal[q];
        sweep.left[q] = e - up - along;
        sweep.pass[q] = up + sweep.diagonal[q];
        sweep.diagonal[q] = along;
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
  UNROLL_BY(1) for (i32 first = 32 - STEPS; first >= 0; first -= STEPS) {
    if (end >= base + first && end < base + first + STEPS) sweep_steps(Yes{}, first);
    else sweep_steps(No{}, first);
  }
}

// Returns the columns at which the strip passes weight up.
DEVICE Range backward_strip(const Params& p, const Strip& s, const Series& series, const Range& received, float seed, float factor,
                            BackwardShared& shared) {
  const i32 lane = (i32)lane_index();
  const StoredState* bound = saved_bound(p, s, s.index - 1);
  float* row = (float*)(p.rows + s.pair * p.row_bytes);
  LaneSeries own;
  read_rows(own, series, s);
  Sweep sweep;
  clear_weight(sweep);
  UNROLL for (int q = 0; q < LANE_ROWS; q++) { clear(sweep.grad_x[q]); clear(sweep.grad_y[q]); }
  const i32 end = s.is_last ? final_step(s) : -1;
  i32 start = last_step(s);
  if (!s.is_last && received.last + STRIP_ROWS - 1 < start) start = received.last + STRIP_ROWS - 1;
  Range passed{s.m, -1};
  bool riding = false;  // whether sums of grad_y are on their way up
  i32 filled = (start / 32 + 1) * 32;  // columns from here on are in the window
  UNROLL_BY(1) for (i32 base = start / 32 * 32; base >= 0; base -= 32) {
    // What comes from the strip below: its first row is at our last row's column.
    float from_below = 0.0f;
    const i32 column_below = base + lane - (STRIP_ROWS - 1);
    if (!s.is_last && column_below >= received.first && column_below <= received.last) from_below = row[column_below];
    if (from_below < LEAST_MASS) from_below = 0.0f;
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
      put_features(shared.y, filled + lane, read_features(series.y, filled + lane, s.m, series.d));
    }
    shared.passed_in[lane] = from_below;
    shared.top[lane] = row_above(bound, s, base + lane);
    Walker w = kept_walker(p, s, base / 32);
    warp_barrier();
    LaneShares rows;
    walk_chunk(w, own, shared.y, shared.top, base, series.scale,
               [&](i32, int q, const Terms& t, real sum) {
                 const Shares share = shares_of(t, sum);
                 rows.up[q] = share.up;
                 rows.diagonal[q] = share.diagonal;
               },
               [&](i32 k) { shared.shares[k][lane] = rows; });
    warp_barrier();
    sweep_chunk(sweep, own, shared, s, base, end, seed);
    warp_barrier();
    const i32 column = base + lane;
    Features sum;
    UNROLL for (int i = 0; i < VECTORS; i++) {
      const Vector part = shared.grad_y[i][lane];
      UNROLL for (int j = 0; j < VECTOR; j++) sum.v[i * VECTOR + j] = part.v[j];
    }
    add_grad_y(p, s, column, factor, sum);
    if (s.index > 0 && column < s.m) row[column] = shared.passed_out[lane];
    const u32 some = lanes_where(column < s.m && !(shared.passed_out[lane] < LEAST_MASS));
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

static_assert(sizeof(BackwardShared) <= BACKWARD_SHARED, "the launcher asks for too little shared memory");
#if HAS_BACKWARD
KERNEL THREADS_PER_BLOCK(32, BACKWARD_BLOCKS) pair_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  BackwardShared& shared = *(BackwardShared*)memory;
  const i32 pair = (i32)block_index(), lane = (i32)lane_index();
  ready_rerun(p, pair);
  const Strip last = strip_of(p, pair, 0);
  if (!last.valid || !(p.health[pair] & 1u)) return;
  const Series series = series_of(p, pair);
  const float value = ((const float*)p.value)[pair];
  const float seed = value - value == 0.0f ? 1.0f : value != value ? value : 0.0f;
  const float factor = 2.0f * gradient_of_value(p, pair);
  const i32 numbers = last.m * p.d;
  float* sums = (float*)p.sum_y + (i64)pair * p.m * p.d;
  if (p.grad_y)
    for (i32 i = lane; i < numbers; i += 32) sums[i] = 0.0f;
  Range received{0, -1};
  for (i32 index = (last.n - 1) / STRIP_ROWS; index >= 0; index--) {
    warp_barrier();
    received = backward_strip(p, strip_of(p, pair, index), series, received, seed, factor, shared);
  }
  if (INPUT != 0 && p.grad_y) {
    warp_barrier();
    for (i32 i = lane; i < numbers; i += 32) store_gradient(p.grad_y, (i64)pair * p.m * p.d + i, sums[i], p.grad_y_wide);
  }
}
#endif
