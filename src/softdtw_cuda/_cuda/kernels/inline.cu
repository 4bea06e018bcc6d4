// Soft-DTW with the cost of a cell computed at the step that needs it: one warp per strip, nothing but the recurrence.
// Used for univariate series, where the cost is three instructions, and for the wide arithmetic, where it is rare
// enough that reading x and y straight from memory is fine. tiled.cu is the other pair of kernels.
//
//   (5, 6)  Z_ij = w_ij (Z_{i-1,j-1} + Z_{i-1,j} + Z_{i,j-1}),   Z = f 2^-n,   Z_00 = 1, no path from any other border
//   (8)     E_ij = E_{i+1,j} p_up(i+1,j) + E_{i,j+1} p_left(i,j+1) + E_{i+1,j+1} p_diag(i+1,j+1),   E_NM = 1
//
// A strip is STRIP_ROWS rows of one pair; lane t has rows t * LANE_ROWS and on. At step s row r of the strip is at
// column s - r, so a step is one anti-diagonal: "up" is the row above one step ago, "diagonal" is the row above two
// steps ago, "left" is the row itself one step ago. All cells of a step are independent of each other, and every one
// depends only on the two steps before: the order is legal. Rows of other strips come through the hand-off row.
// Cells left of column 0 stay "no path" by themselves; cells right of the last column and below the last row are
// computed from whatever is there and never reach a real cell, since paths only go right and down.
//
// The forward saves the lanes' state every CHECKPOINT steps and each strip's bottom row. The backward walks the
// checkpoints in reverse; from each it recomputes the states every SUBWALK steps, then, last subwalk first, recomputes
// the shares (7) of SUBWALK steps into shared memory and sweeps (8) through them in reverse.
//
//   MODE 0  cost matrix (B, N, M)      MODE 1  squared Euclidean, any D      MODE 2  the same for D = 1 (narrow only)
#include "primitives.cuh"
#include "recurrence.cuh"
#include "walker.cuh"

#define SUBWALKS (CHECKPOINT / SUBWALK)
#if WIDE
#define UNROLL_STEPS UNROLL_BY(1)  // rarely run: smaller code, quicker to compile, and rare cases are not set apart
#else
#define UNROLL_STEPS UNROLL
#endif

// ---- costs
#if MODE == 2
// The lane's own x and the y of its column, which moves down one row per step.
struct Costs {
  float x[LANE_ROWS], y[LANE_ROWS];
  float scale;
  i32 offset;  // row - column of the lane's first row at step 0 is `offset`
};
DEVICE Costs open_costs(const Params& p, const Strip& s) {
  Costs c;
  c.scale = (float)p.scale;
  const element* x = (const element*)p.x + s.pair * p.x_stride;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    i32 row = s.first_row + (i32)lane_index() * LANE_ROWS + q;
    // Rows and columns outside the series get an ordinary value: their cells must stay within the range of (6), though
    // no path goes through them.
    c.x[q] = to_float(x[row < s.n ? row : 0]);
    c.y[q] = 0.0f;
  }
  c.offset = s.first_row;
  return c;
}
// y_at points at the y of column 0 in a window that reaches back STRIP_ROWS columns from the step.
DEVICE void seek_costs(Costs& c, const float* y_at, i32 step) {
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) c.y[q] = y_at[step - 1 - (i32)lane_index() * LANE_ROWS - q];
}
DEVICE void step_costs(real (&cost)[LANE_ROWS], Costs& c, float y, const Strip& s, i32 step) {
  UNROLL for (int q = LANE_ROWS - 1; q > 0; q--) c.y[q] = c.y[q - 1];
  c.y[0] = y;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    float difference = c.x[q] - c.y[q];
    cost[q] = (difference * difference) * c.scale;  // in this order a difference without rounding costs one rounding
#if BANDED
    i32 row = (i32)lane_index() * LANE_ROWS + q;
    i32 offset = step - row - row - s.first_row + s.bandwidth;  // column - row + bandwidth
    cost[q] = (u32)offset <= 2u * (u32)s.bandwidth ? cost[q] : 2.0f * FORBIDDEN_FROM;
#endif
  }
}
#else
struct Costs {
  const element* x;
  const element* y;
};
DEVICE Costs open_costs(const Params& p, const Strip& s) {
  return Costs{(const element*)p.x + s.pair * p.x_stride, (const element*)p.y + s.pair * p.y_stride};
}
#if MODE == 1
DEVICE_CALL real distance(const element* x, const element* y, i32 d) {
  real sum = 0;
  for (i32 k = 0; k < d; k++) {
    real difference = (real)to_float(x[k]) - (real)to_float(y[k]);
    sum += difference * difference;
  }
  return sum;
}
#endif
DEVICE real scaled_cost(const Params& p, const Costs& c, const Strip& s, i32 row, i32 column) {
  if (row >= s.n || !in_band(s, row, column)) return (real)2 * FORBIDDEN_FROM;
#if MODE == 0
  return (real)to_float(c.x[(i64)row * p.m + column]) * p.scale;
#else
  return distance(c.x + (i64)row * p.d, c.y + (i64)column * p.d, p.d) * p.scale;
#endif
}
DEVICE void step_costs(real (&cost)[LANE_ROWS], const Costs& c, const Params& p, const Strip& s, i32 step) {
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    i32 row = (i32)lane_index() * LANE_ROWS + q;
    cost[q] = scaled_cost(p, c, s, s.first_row + row, step - row);
  }
}
#endif

// What eight steps read from shared memory, read before any of them writes there: a store in between would hold every
// later load back until its own value is known. Wide steps are not unrolled and read as they go.
struct EightSteps {
#if !WIDE
  StoredState top[8];
#endif
#if MODE == 2
  float y[8];
#endif
};
DEVICE EightSteps read_ahead(const StoredState* top, const float* y_at, i32 step) {
  EightSteps ahead;
#if !WIDE
  UNROLL for (int k = 0; k < 8; k++) ahead.top[k] = top[k];
#endif
#if MODE == 2
  UNROLL for (int k = 0; k < 8; k++) ahead.y[k] = y_at[step + k - (i32)lane_index() * LANE_ROWS];
#endif
  return ahead;
}
#if WIDE
#define TOP(ahead, k, from) (from)[k]
#else
#define TOP(ahead, k, from) (ahead).top[k]
#endif
#if MODE == 2
#define Y_AT y_at
#define STEP_COSTS(cost, ahead, k, step) step_costs(cost, costs, (ahead).y[k], s, step)
#else
#define Y_AT nullptr
#define STEP_COSTS(cost, ahead, k, step) step_costs(cost, costs, p, s, step)
#endif

// ---- forward
struct alignas(64) ForwardShared {
  StoredState top[32], bottom[32];
#if MODE == 2
  float y[STRIP_ROWS + 32];  // the columns that a chunk can touch
#endif
};

#if MODE == 2
// The rounding trick needs s < 2^21: with |x - r|, |y - r| < 724 / sqrt(scale) for a common r that holds.
DEVICE bool out_of_range(float v, float reference, float scale) {
  float difference = v - reference;
  return !(difference * difference * scale < 524288.0f);
}
#endif

DEVICE void forward_strip(const Params& p, const Strip& s, ForwardShared& shared) {
  const i32 lane = (i32)lane_index();
  const u32 owner_in = (u32)(s.index - 1), owner_out = (u32)s.index;
  const HandoffRow row = handoff_row(p, s.pair);
  StoredState* bound = saved_bound(p, s, s.index);
  Costs costs = open_costs(p, s);
  Walker w = first_walker(s);
  const i32 end = s.is_last ? final_step(s) : -1;
  Scaled result = no_path();
  const i32 leaving = s.is_last ? s.n - 1 - s.first_row : STRIP_ROWS - 1;
#if MODE == 2
  const element* y = (const element*)p.y + s.pair * p.y_stride;
  const float reference = to_float(((const element*)p.x)[s.pair * p.x_stride]);
  bool bad = false;
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    bad |= s.first_row + lane * LANE_ROWS + q < s.n && out_of_range(costs.x[q], reference, costs.scale);
  for (i32 i = lane; i < STRIP_ROWS + 32; i += 32) shared.y[i] = reference;
#endif
  const i32 start = first_checkpoint(s) * CHECKPOINT;
  // The row above is asked for one part ahead; only if it was not there yet is it polled.
  RowWord ahead{};
  bool wanted = s.index > 0 && lane < HANDOFF && in_band(s, s.first_row - 1, start + lane);
  if (wanted) ahead = load_word(row, start + lane);
#if MODE == 2
  element next_y = y[start + lane < s.m ? start + lane : s.m - 1];  // and so is y
#endif
  for (i32 base = start; base <= last_step(s); base += 32) {
#if MODE == 2
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
    const float* y_at = shared.y + STRIP_ROWS - base;
#endif
    UNROLL_BY(1) for (i32 part = 0; part < 32; part += HANDOFF) {
      StoredState top{(real)EMPTY_FRACTION, (exponent)NO_PATH};
      if (wanted) {
        if (!is_from(ahead, owner_in)) ahead = await_word(row, base + part + lane, owner_in);
        Scaled z = unpack_state(ahead);
        top = StoredState{z.f, z.n};
      }
      if (lane < HANDOFF) shared.top[lane] = top;
      wanted = s.index > 0 && lane < HANDOFF && in_band(s, s.first_row - 1, base + part + HANDOFF + lane);
      if (wanted) ahead = load_word(row, base + part + HANDOFF + lane);
      warp_barrier();
#if MODE == 2
      seek_costs(costs, y_at, base + part);
#endif
      // The row that leaves the strip: the bottom one for the next strip, or the pair's last for its result.
      auto walk = [&](auto last_strip) {
        UNROLL_BY(1) for (i32 eight = 0; eight < HANDOFF; eight += 8) {
          const i32 step = base + part + eight;
          if (step % CHECKPOINT == 0 && step <= last_step(s)) keep_walker(p, s, step / CHECKPOINT, w);
          const EightSteps ahead8 = read_ahead(shared.top + eight, Y_AT, step);
          UNROLL_STEPS for (i32 k = 0; k < 8; k++) {
            real cost[LANE_ROWS];
            STEP_COSTS(cost, ahead8, k, step + k);
            advance(w, cost, TOP(ahead8, k, shared.top + eight), [](int, const Terms&, real) {});
            if (decltype(last_strip)::value) {
              if (lane == leaving / LANE_ROWS) shared.bottom[eight + k] = row_of(w, leaving % LANE_ROWS);
            } else {
              if (lane == 31) shared.bottom[eight + k] = row_of(w, LANE_ROWS - 1);
            }
          }
          if (eight & 8) renormalize(w);
        }
      };
      if (WIDE || s.is_last) walk(Yes{});
      else walk(No{});
      warp_barrier();
      i32 column = base + part + lane - (STRIP_ROWS - 1);
      if (!s.is_last && lane < HANDOFF && in_band(s, s.first_row + STRIP_ROWS - 1, column)) {
        StoredState z = shared.bottom[lane];
        store_word(row, column, pack_state(Scaled{z.f, z.n}, owner_out));
        if (p.save) bound[column] = z;
      }
      if (end >= base + part && end < base + part + HANDOFF) {
        StoredState z = shared.bottom[end - base - part];
        result = Scaled{z.f, z.n};
      }
      warp_barrier();
    }
  }
  const bool again = p.redo && p.save && p.grad;  // the value is known, only the states are wanted
  if (s.is_last && lane == 0 && !again) {
    ((result_type*)p.value)[s.pair] = (result_type)(((double)result.n - log2_exact((double)result.f)) * p.unscale);
#if !WIDE
    if (result.n >= 1 << 29) { clear_bits(&p.health[s.pair], 1u); clear_bits(&p.health[p.batch], 1u); }
#endif
  }
#if MODE == 2
  if (bad) { clear_bits(&p.health[s.pair], 1u); clear_bits(&p.health[p.batch], 1u); }
#endif
}

static_assert(sizeof(ForwardShared) <= FORWARD_SHARED, "the launcher asks for too little shared memory");
#if WIDE || __CUDA_ARCH__ >= 1000
#define FORWARD_BLOCKS 16  // 20 would leave it too few registers
#else
#define FORWARD_BLOCKS 20  // five warps to a scheduler
#endif
#if HAS_FORWARD
KERNEL THREADS_PER_BLOCK(32, FORWARD_BLOCKS) inline_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  ForwardShared& shared = *(ForwardShared*)memory;
#if WIDE
  if (p.redo && (p.health[p.batch] & 1u)) { restore_scratch(p); return; }
#endif
  do {
    u32 ticket = 0;
    if (lane_index() == 0) ticket = next_ticket(p);
    ticket = from_lane(ticket, 0);
    if (ticket >= (u32)p.batch * (u32)afresh(p.strips)) return;  // nothing to keep in a register from strip to strip
    const Assignment mine = assignment_of(p, ticket);
    Strip s = strip_of(p, mine.pair, mine.turn);
#if WIDE
    if (p.redo && ((p.health[s.pair] & 1u) || !s.valid)) {
      if (mine.turn == 0) restore_scratch(p, s.pair);
      continue;
    }
#endif
    if (!s.valid) {
      if (s.index == 0 && lane_index() == 0) ((result_type*)p.value)[s.pair] = (result_type)double_of(0x7ff8000000000000ull);
      continue;
    }
    if (!s.present) continue;
#if WIDE
    if (p.redo) begin_second_walk(p, s.pair, 0, s.index, (s.n - 1) / STRIP_ROWS);
#endif
    forward_strip(p, s, shared);
    warp_barrier();
#if WIDE
    if (p.redo) end_second_walk(p, s.pair, 0, s.index, (s.n - 1) / STRIP_ROWS, true);
#endif
  } while (p.redo);
}
#endif

// ---- backward
// At D = 1 the gradient of y rides along: each row adds its share to the y of its column and passes it up, strip
// after strip, so the order of that sum is fixed.
// Where nothing is forbidden the left share is what the other two leave of E, and need not be kept; next to a forbidden
// cell it must be exactly nothing, so there it is.
#define KEEP_LEFT (BANDED || WIDE)
struct alignas(2 * sizeof(real) * LANE_ROWS) LaneShares { real up[LANE_ROWS], diagonal[LANE_ROWS]; };
struct alignas(sizeof(real) * LANE_ROWS) LeftShares { real left[LANE_ROWS]; };
#define AT_A_TIME 8  // steps whose shares are read before any flow is written
struct alignas(64) BackwardShared {
  LaneShares shares[SUBWALK][32];
#if KEEP_LEFT
  LeftShares left[SUBWALK][32];
#endif
  Flow flow_in[SUBWALK], flow_out[SUBWALK];
  StoredState top[CHECKPOINT];
#if SUBWALKS > 2
  SavedStates states[SUBWALKS - 2];  // at the begin of subwalks 1 and on, the last excepted
#endif
#if MODE == 2
  float y[STRIP_ROWS + CHECKPOINT];
#endif
};

#if MODE == 1
// Adds E_ij's part of the gradients, x_i and y_j known by row and column. Row i is this lane's alone; column j is
// touched by one lane per step, and by one strip at a time because strips take turns.
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
DEVICE void await_turn(const Params& p, const Strip& s, const Strip& below, i32 walk_index, i32 tile) {
  if (!p.grad_y || tile < 0 || !touches(s, tile)) return;
  if (!s.is_last && touches(below, tile)) {
    if (lane_index() == 0)
      while (load_acquire(&p.turns[(i64)s.pair * p.tiles + tile]) != (u32)(walk_index - 1)) wait_a_little();
  } else {
    result_type* gy = (result_type*)p.sum_y + ((i64)s.pair * p.m + tile * 32) * p.d;
    i64 columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32;
    for (i64 i = lane_index(); i < columns * p.d; i += 32) gy[i] = 0;
  }
  warp_barrier();
}
DEVICE void pass_turn(const Params& p, const Strip& s, i32 walk_index, i32 tile) {
  if (!p.grad_y || tile < 0 || !touches(s, tile)) return;
  warp_barrier();
  if (s.index > 0 && touches(strip_of(p, s.pair, s.index - 1), tile)) {
    if (lane_index() == 0) store_release(&p.turns[(i64)s.pair * p.tiles + tile], (u32)walk_index);
  } else if (p.grad_y != p.sum_y) {  // the last strip to add: the sums are final
    i64 at = ((i64)s.pair * p.m + tile * 32) * p.d;
    i64 columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32;
    for (i64 i = lane_index(); i < columns * p.d; i += 32)
      store_gradient(p.grad_y, at + i, load_fresh((result_type*)p.sum_y + at + i), p.grad_y_wide);
  }
}
#endif

#if MODE == 2
static_assert(CHECKPOINT % 32 == 0 && SUBWALKS <= 2, "provisions are whole columns, and a second walk starts from them");
// What the walk from a checkpoint needs of memory, asked for one checkpoint ahead.
struct Provisions {
  StoredState top[CHECKPOINT / 32];
  element y[LANE_ROWS + CHECKPOINT / 32];
  Fetched start;
};
DEVICE Provisions provisions_of(const Params& p, const Strip& s, const StoredState* bound, const element* y, i32 checkpoint) {
  Provisions ahead;
  const i32 column = checkpoint * CHECKPOINT + (i32)lane_index();
  UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) {
    bool there = s.index > 0 && in_band(s, s.first_row - 1, column + i * 32);
    ahead.top[i] = there ? bound[column + i * 32] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
  }
  UNROLL for (int i = 0; i < LANE_ROWS + CHECKPOINT / 32; i++) {
    i32 at = column + (i - LANE_ROWS) * 32;
    ahead.y[i] = y[at < 0 ? 0 : at < s.m ? at : s.m - 1];
  }
  ahead.start = fetch_kept(p, s, checkpoint);
  return ahead;
}
#endif
static_assert(SUBWALK <= 32, "one lane has one column of a subwalk");

// ---- where there is mass
// E is next to nothing but for a neighbourhood of the likely paths, and moves up and left only. So a strip begins at the
// checkpoint in which mass first comes to it, from the right, and ends when all of it has left.
//
//   begins   it looks through the words of the strip below from the right; columns that come without mass are complete,
//            since no strip further up has any there. It tells its last column, `reach`: it hands on nothing right of it.
//            The first p.lead strips begin at their last column.
//   ends     once its own cells have nothing left to pass on, the strip below has ended, and it has come as far as that.
//            Sums of grad_y that are still on their way up are handed on from where they are.
//
// Who waits for a word asks whether the strip below has ended; every strip says where it begins and that it has ended,
// whatever comes to it, and stores all words between the two that are asked for, so nobody waits for ever. Nobody stores
// where somebody is still to read: who stores a word has read his neighbour's there, or knows that it has ended.
#define TRIMS (MODE == 2 && !WIDE)
#if TRIMS
// The first checkpoint, from the right, in which mass comes to the strip.
DEVICE i32 find_mass(const Params& p, const Strip& s, const HandoffRow& row, i32 walk_index, double grad) {
  const i32 reach_below = await_begin(p, row, walk_index - 1);
  const u32* end_below = end_of(p, row, walk_index - 1);
  const i32 bottom = s.first_row + STRIP_ROWS - 1;
  i32 checkpoint = last_step(s) / CHECKPOINT;
  if (checkpoint > (reach_below + STRIP_ROWS - 1) / CHECKPOINT) checkpoint = (reach_below + STRIP_ROWS - 1) / CHECKPOINT;
  for (; checkpoint > first_checkpoint(s); checkpoint--) {
    Received from_below[CHECKPOINT / 32];
    bool mass = false;
    UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) {
      const i32 column = checkpoint * CHECKPOINT + i * 32 + (i32)lane_index() - (STRIP_ROWS - 1);
      from_below[i] = Received{Flow{0, 0}, false};
      if (column <= reach_below && passes_up(s, bottom + 1, column))
        from_below[i] = await_flow(row, column, (u32)(walk_index - 1), end_below);
      mass |= !(from_below[i].flow.pass < LEAST_MASS);
    }
    if (any_lane(mass)) break;
    UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) {
      const i32 column = checkpoint * CHECKPOINT + i * 32 + (i32)lane_index() - (STRIP_ROWS - 1);
      if (p.grad_y && from_below[i].there && in_band(s, bottom, column))
        store_gradient(p.grad_y, (i64)s.pair * p.m + column, (result_type)(2.0f * (float)grad * from_below[i].flow.y), p.grad_y_wide);
    }
  }
  return checkpoint;
}
#endif

DEVICE void backward_strip(const Params& p, const Strip& s, BackwardShared& shared) {
  const i32 lane = (i32)lane_index();
  const i32 walk_index = (s.n - 1) / STRIP_ROWS - s.index;
  const u32 owner_in = (u32)(walk_index - 1), owner_out = (u32)walk_index;
  const HandoffRow row = handoff_row(p, s.pair);
  const StoredState* bound = saved_bound(p, s, s.index - 1);
  const double value = (double)((const result_type*)p.value)[s.pair];
  const double grad = (double)gradient_of_value(p, s.pair);
  // No path at all: nothing to pass back. A NaN poisons the sample.
  const real seed = value - value == 0.0 ? (real)1 : value != value ? (real)value : (real)0;
  const i32 end = s.is_last ? final_step(s) : -1;
  Costs costs = open_costs(p, s);
  real left[LANE_ROWS], diagonal[LANE_ROWS], pass[LANE_ROWS];  // what each row's last cell sends on
  UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = diagonal[q] = pass[q] = 0;
#if MODE == 2
  const element* y = (const element*)p.y + s.pair * p.y_stride;
  real gx[LANE_ROWS], gy[LANE_ROWS];
  UNROLL for (int q = 0; q < LANE_ROWS; q++) gx[q] = gy[q] = 0;
  const float reference = to_float(((const element*)p.x)[s.pair * p.x_stride]);
#endif
#if MODE == 1
  const Strip below = strip_of(p, s.pair, s.index + 1);
  i32 tile_open = s.last_column / 32 + 1;  // tiles from here on are already ours
  if (p.grad_x)
    for (i32 q = 0; q < STRIP_ROWS; q++)
      if (s.first_row + q < s.n)
        for (i32 k = lane; k < p.d; k += 32) ((result_type*)p.sum_x)[((i64)s.pair * p.n + s.first_row + q) * p.d + k] = 0;
  warp_barrier();
#endif
  i32 begin = last_step(s) / CHECKPOINT, reach = s.m - 1;
#if TRIMS
  const bool whole = !(value - value == 0.0);  // a pair without a path, or poisoned
  const u32* end_below = end_of(p, row, walk_index - 1);
  i32 reach_below = s.m - 1;
  bool given = s.is_last, over = false;  // whether mass has come; whether it has left again
  if (walk_index >= p.lead && !whole) {
    begin = find_mass(p, s, row, walk_index, grad);
    reach_below = await_begin(p, row, walk_index - 1);  // told already
    const i32 last = (begin + 1) * CHECKPOINT - STRIP_ROWS;
    if (last < reach) reach = last;
  }
  if (s.index > 0 && lane == 0) tell_begin(p, row, walk_index, reach);
#endif
#if MODE == 2
  Provisions next = provisions_of(p, s, bound, y, begin);
#endif
  for (i32 checkpoint = begin; checkpoint >= first_checkpoint(s); checkpoint--) {
#if TRIMS
    if (over) break;
#endif
    const i32 base = checkpoint * CHECKPOINT;
    warp_barrier();
#if MODE == 2
    const Walker start = walker_of(next.start, s, checkpoint);
    UNROLL for (int i = 0; i < CHECKPOINT / 32; i++) shared.top[i * 32 + lane] = next.top[i];
    UNROLL for (int i = 0; i < LANE_ROWS + CHECKPOINT / 32; i++) {
      i32 column = base + (i - LANE_ROWS) * 32 + lane;
      shared.y[i * 32 + lane] = column >= 0 && column < s.m ? to_float(next.y[i]) : reference;
    }
    const float* y_at = shared.y + STRIP_ROWS - base;
    if (checkpoint > first_checkpoint(s)) next = provisions_of(p, s, bound, y, checkpoint - 1);
#else
    for (i32 i = lane; i < CHECKPOINT; i += 32) {
      bool there = s.index > 0 && in_band(s, s.first_row - 1, base + i);
      shared.top[i] = there ? bound[base + i] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
    }
    const Walker start = kept_walker(p, s, checkpoint);
#endif
    i32 subwalk = (last_step(s) - base) / SUBWALK;
    if (subwalk > SUBWALKS - 1) subwalk = SUBWALKS - 1;
    Walker w = start;
    warp_barrier();
#if SUBWALKS > 1
    for (i32 i = 0; i < subwalk; i++) {
#if SUBWALKS > 2
      if (i > 0) store_walker(&shared.states[i - 1], w);
#endif
#if MODE == 2
      seek_costs(costs, y_at, base + i * SUBWALK);
#endif
      UNROLL_BY(1) for (i32 eight = 0; eight < SUBWALK; eight += 8) {
        const EightSteps ahead8 = read_ahead(shared.top + i * SUBWALK + eight, Y_AT, base + i * SUBWALK + eight);
        UNROLL_STEPS for (i32 k = 0; k < 8; k++) {
          real cost[LANE_ROWS];
          STEP_COSTS(cost, ahead8, k, base + i * SUBWALK + eight + k);
          advance(w, cost, TOP(ahead8, k, shared.top + i * SUBWALK + eight), [](int, const Terms&, real) {});
        }
        if (eight & 8) renormalize(w);
      }
    }
#endif
    for (bool resumed = true; subwalk >= 0; subwalk--, resumed = false) {
      const i32 first = base + subwalk * SUBWALK;
#if SUBWALKS > 2
      if (!resumed) w = subwalk > 0 ? unpacked(fetch_walker(&shared.states[subwalk - 1])) : kept_walker(p, s, checkpoint);
#else
      if (!resumed) w = start;
#endif
      // Flows of the strip below: its first row is at our last row's column. Asked for here, needed after the walk.
      const i32 flow_column = first + lane - (STRIP_ROWS - 1);
      bool wanted = lane < SUBWALK && !s.is_last && passes_up(s, s.first_row + STRIP_ROWS, flow_column);
#if TRIMS
      wanted = wanted && flow_column <= reach_below;
#endif
      RowWord ahead{};
      if (wanted) ahead = load_word(row, flow_column);
#if MODE == 2
      seek_costs(costs, y_at, first);
#endif
      UNROLL_BY(1) for (i32 eight = 0; eight < SUBWALK; eight += 8) {
        const EightSteps ahead8 = read_ahead(shared.top + first - base + eight, Y_AT, first + eight);
        UNROLL_STEPS for (i32 k = 0; k < 8; k++) {
          real cost[LANE_ROWS];
          STEP_COSTS(cost, ahead8, k, first + eight + k);
          LaneShares share_of_rows;
          LeftShares left_of_rows;
          advance(w, cost, TOP(ahead8, k, shared.top + first - base + eight), [&](int q, const Terms& t, real sum) {
            Shares share = shares_of(t, sum);
            share_of_rows.up[q] = share.up;
            share_of_rows.diagonal[q] = share.diagonal;
            left_of_rows.left[q] = share.left;
          });
          shared.shares[eight + k][lane] = share_of_rows;
#if KEEP_LEFT
          shared.left[eight + k][lane] = left_of_rows;
#endif
        }
        if (eight & 8) renormalize(w);
      }
#if TRIMS
      Flow from_below{0, 0};
      if (wanted) from_below = is_from(ahead, owner_in) ? unpack_flow(ahead) : await_flow(row, flow_column, owner_in, end_below).flow;
      if (from_below.pass < LEAST_MASS) from_below.pass = 0;
      given = given || any_lane(from_below.pass != (real)0);
      if (lane < SUBWALK) shared.flow_in[lane] = from_below;
#else
      if (wanted && !is_from(ahead, owner_in)) ahead = await_word(row, flow_column, owner_in);
      if (lane < SUBWALK) shared.flow_in[lane] = wanted ? unpack_flow(ahead) : Flow{};
#endif
#if MODE == 1
      i32 leftmost = (first - (STRIP_ROWS - 1)) / 32;
      if (leftmost < 0) leftmost = 0;
      while (tile_open > leftmost) await_turn(p, s, below, walk_index, --tile_open);
#endif
      warp_barrier();
#if MODE == 2
      UNROLL for (int q = 0; q < LANE_ROWS; q++) costs.y[q] = y_at[first + SUBWALK - lane * LANE_ROWS - q];
#endif
      auto sweep_part = [&](auto with_end, i32 part) {
#if !WIDE
        LaneShares shares[AT_A_TIME];
        LeftShares lefts[AT_A_TIME];
        Flow flows[AT_A_TIME];
        UNROLL for (int k = 0; k < AT_A_TIME; k++) {
          shares[k] = shared.shares[part + k][lane];
#if KEEP_LEFT
          lefts[k] = shared.left[part + k][lane];
#endif
          flows[k] = shared.flow_in[part + k];
        }
#endif
#if MODE == 2
        float ys[AT_A_TIME];
        UNROLL for (int k = 0; k < AT_A_TIME; k++) ys[k] = y_at[first + part + k - lane * LANE_ROWS - (LANE_ROWS - 1)];
#endif
        UNROLL_STEPS for (i32 k = AT_A_TIME - 1; k >= 0; k--) {
          const i32 step = first + part + k;
#if WIDE
          const LaneShares share = shared.shares[part + k][lane];
          const LeftShares left_share = shared.left[part + k][lane];
          const Flow from_below = shared.flow_in[part + k];
#else
          const LaneShares& share = shares[k];
          const LeftShares& left_share = lefts[k];
          const Flow& from_below = flows[k];
#endif
          Flow in{from_lane_below(pass[0]), 0};
#if MODE == 2
          in.y = from_lane_below(gy[0]);
          UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) costs.y[q] = costs.y[q + 1];
          costs.y[LANE_ROWS - 1] = ys[k];
#endif
          if (lane == 31) in = from_below;
          // Rows in order: row q reads what row q + 1 passed in the step before, which must not be overwritten yet.
          UNROLL for (int q = 0; q < LANE_ROWS; q++) {
            real e = left[q] + (q < LANE_ROWS - 1 ? pass[q + 1 < LANE_ROWS ? q + 1 : q] : in.pass);
            if (decltype(with_end)::value && step == end && s.first_row + lane * LANE_ROWS + q == s.n - 1) e = seed;
            real up = e * share.up[q], aslant = e * share.diagonal[q];
            left[q] = KEEP_LEFT ? e * left_share.left[q] : e - up - aslant;
            pass[q] = up + diagonal[q];
            diagonal[q] = aslant;
#if MODE == 2
            real difference = costs.x[q] - costs.y[q];
            gx[q] = multiply_add(e, difference, gx[q]);
            gy[q] = multiply_add(-e, difference, q < LANE_ROWS - 1 ? gy[q + 1 < LANE_ROWS ? q + 1 : q] : in.y);
#else
            i32 row = lane * LANE_ROWS + q, column = step - row;
            row += s.first_row;
            if (row < s.n && in_band(s, row, column) && e != (real)0) {
#if MODE == 0
              store_gradient(p.grad_x, ((i64)s.pair * p.n + row) * p.m + column, (result_type)(e * grad), p.grad_x_wide);
#else
              add_gradient(p, costs, s, row, column, e * grad);
#endif
            }
#endif
          }
          if (lane == 0) {
            Flow out{pass[0], 0};
#if MODE == 2
            out.y = gy[0];
#endif
            shared.flow_out[part + k] = out;
          }
#if MODE == 1
          warp_barrier();
#endif
        }
      };
      UNROLL_BY(1) for (i32 part = SUBWALK - AT_A_TIME; part >= 0; part -= AT_A_TIME) {
        if (WIDE || (end >= first + part && end < first + part + AT_A_TIME)) sweep_part(Yes{}, part);
        else sweep_part(No{}, part);
      }
      warp_barrier();
      for (i32 i = lane; i < SUBWALK; i += 32) {
        Flow out = shared.flow_out[i];
        i32 column = first + i;
#if MODE == 2
        // The column's sum is complete where the band, or the series, has no row above.
        bool handed_on = s.index > 0 && in_band(s, s.first_row - 1, column);
        if (p.grad_y && !handed_on && column >= s.first_column && column <= s.last_column && column <= reach)
          store_gradient(p.grad_y, (i64)s.pair * p.m + column, (result_type)(2.0f * (float)grad * out.y), p.grad_y_wide);
#endif
        if (s.index > 0 && column <= reach && passes_up(s, s.first_row, column)) store_word(row, column, pack_flow(out, owner_out));
      }
#if TRIMS
      bool some = s.index == 0 || whole || !given;  // the first strip has mass in its first column
      UNROLL for (int q = 0; q < LANE_ROWS; q++) some |= !(left[q] < LEAST_MASS && diagonal[q] < LEAST_MASS && pass[q] < LEAST_MASS);
      const bool quiet = !any_lane(some);
      if (quiet)  // whether it ends or not, so that E does not depend on when it learns of the other's end
        UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = diagonal[q] = pass[q] = 0;
      if (quiet && first <= (s.is_last ? end : from_lane(peek_end(end_below), 0))) {
        // The sums of grad_y on their way up, each row's of its own column.
        UNROLL for (int q = 0; q < LANE_ROWS; q++) {
          const i32 r = lane * LANE_ROWS + q, column = first - r;
          if (r > 0 && column >= s.first_column && column <= s.last_column && column <= reach) {
            if (in_band(s, s.first_row - 1, column)) store_word(row, column, pack_flow(Flow{0, gy[q]}, owner_out));
            else if (p.grad_y) store_gradient(p.grad_y, (i64)s.pair * p.m + column, (result_type)(2.0f * (float)grad * gy[q]), p.grad_y_wide);
          }
        }
        over = true;
      }
      if (over || first <= first_checkpoint(s) * CHECKPOINT) {
        warp_barrier();
        if (s.index > 0 && lane == 0) store_release(end_of(p, row, walk_index), (u32)first);
        if (over) break;
      }
#endif
#if MODE == 1
      if (first % 32 == 0) pass_turn(p, s, walk_index, first / 32);
#endif
      warp_barrier();
    }
  }
#if MODE == 1
  warp_barrier();
  if (p.grad_x && p.grad_x != p.sum_x)
    for (i32 q = 0; q < STRIP_ROWS; q++)
      if (s.first_row + q < s.n)
        for (i32 k = lane; k < p.d; k += 32) {
          i64 at = ((i64)s.pair * p.n + s.first_row + q) * p.d + k;
          store_gradient(p.grad_x, at, ((result_type*)p.sum_x)[at], p.grad_x_wide);
        }
#elif MODE == 2
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    i32 row = s.first_row + lane * LANE_ROWS + q;
    if (p.grad_x && row < s.n)
      store_gradient(p.grad_x, (i64)s.pair * p.n + row, (result_type)(2.0f * (float)grad * gx[q]), p.grad_x_wide);
  }
#endif
}

static_assert(sizeof(BackwardShared) <= BACKWARD_SHARED, "the launcher asks for too little shared memory");
#if HAS_BACKWARD
KERNEL THREADS_PER_BLOCK(32, 4) inline_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  BackwardShared& shared = *(BackwardShared*)memory;
  u32 ticket = 0;
  if (lane_index() == 0) ticket = next_ticket(p);
  const Assignment mine = assignment_of(p, from_lane(ticket, 0));
  const Strip s = strip_of(p, mine.pair, p.strips - 1 - mine.turn);
  if ((p.health[s.pair] & 1u) && s.valid && s.present) backward_strip(p, s, shared);
}
#endif

#if !WIDE && HAS_AT_ONCE && MODE != 0
// Both passes in one launch, for pairs of one strip. No block waits for another.
static_assert(sizeof(ForwardShared) <= BACKWARD_SHARED, "the passes share their memory");
KERNEL THREADS_PER_BLOCK(32, 4) inline_at_once(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  const Strip s = strip_of(p, (i32)block_index(), 0);
  if (lane_index() == 0) prepare_redo(p, s.pair);
  warp_barrier();
  if (!s.valid) {
    if (lane_index() == 0) ((result_type*)p.value)[s.pair] = float_of(0x7fc00000u);
    return;
  }
  forward_strip(p, s, *(ForwardShared*)memory);
  warp_barrier();
  if (p.health[s.pair] & 1u) backward_strip(p, s, *(BackwardShared*)memory);
}
#endif

#if WIDE && HAS_REDO
DEVICE bool all_are_well(const Params& p) {
  if (!p.scan) return p.health[p.batch] & 1u;
  u32 well = 1u;
  for (i32 pair = (i32)lane_index(); pair < p.batch; pair += 32) well &= p.health[pair];
  return !any_lane(!(well & 1u));
}

// Every pair's value, or the sum of all, is complete when its forward's last strip has said so, if it is walked again, and
// before this launch if not. The one warp that adds them holds a later ticket than those it waits for.
DEVICE void store_total(const Params& p, bool some_again) {
  if (!p.total) return;
  double sum = 0.0;
  for (i32 pair = (i32)lane_index(); pair < p.batch; pair += 32) {
    if (some_again && !(p.health[pair] & 1u) && strip_of(p, pair, 0).valid) {
      const u32 strips = (u32)((strip_of(p, pair, 0).n - 1) / STRIP_ROWS);
      while (load_acquire(strips_token(p, pair, 0)) != strips) wait_a_little();
    }
    sum += (double)load_fresh((const result_type*)p.value + pair);
  }
  UNROLL for (u32 mask = 16; mask > 0; mask /= 2) sum += from_lane_xor(sum, mask);
  if (lane_index() == 0) *(result_type*)p.total = (result_type)(sum * p.weight);
}

// The backward of flagged pairs. The forward's second walk kept nothing, so they are walked forwards once more, with wide
// states in the pair's own place, and then backwards; tickets of the first walk come before all of the second.
static_assert(sizeof(ForwardShared) <= BACKWARD_SHARED, "the walks share their memory");
KERNEL THREADS_PER_BLOCK(32, 2) inline_redo(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  if (all_are_well(p)) {
    if (block_index() == 0) store_total(p, false);
    restore_scratch(p);
    return;
  }
  const u32 tickets = (u32)p.batch * (u32)p.strips;
  for (;;) {
    u32 ticket = 0;
    if (lane_index() == 0) ticket = next_ticket(p);
    ticket = from_lane(ticket, 0);
    const i32 walk = ticket < tickets ? 0 : 1;
    if (ticket >= 2u * tickets) {
      if (ticket == 2u * tickets) store_total(p, true);
      return;
    }
    const Assignment mine = assignment_of(p, ticket - (walk ? tickets : 0u));
    const Strip s = strip_of(p, mine.pair, walk ? p.strips - 1 - mine.turn : mine.turn);
    if ((p.health[s.pair] & 1u) || !s.valid) {
      if (walk == 0 && mine.turn == 0) restore_scratch(p, s.pair);
      continue;
    }
    if (!s.present) continue;
    const i32 last = (s.n - 1) / STRIP_ROWS, turn = walk ? last - s.index : s.index;
    begin_second_walk(p, s.pair, walk, turn, last);
    if (walk == 0) forward_strip(p, s, *(ForwardShared*)memory);
    else backward_strip(p, s, *(BackwardShared*)memory);
    warp_barrier();
    end_second_walk(p, s.pair, walk, turn, last, walk == 1);
  }
}
#endif
