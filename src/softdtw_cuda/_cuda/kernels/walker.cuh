// The lanes of a warp walking a strip, one anti-diagonal per step; see inline.cu for why the order is legal.
#pragma once

// Two antidiagonals: what a lane must remember from one step to the next.
struct Walker {
  Scaled current[LANE_ROWS];   // each row's last cell
  Scaled previous[LANE_ROWS];  // each row's cell before that; the last row's is not used
  Scaled above;                // the row above the lane's first, two steps ago: its next diagonal
};
DEVICE Walker fresh_walker() {
  Walker w;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) w.current[q] = w.previous[q] = no_path();
  w.above = no_path();
  return w;
}
struct alignas(sizeof(real) * 2) StoredState { real f; exponent n; };
// The last cell of the lane's row q.
DEVICE StoredState row_of(const Walker& w, i32 q) {
  StoredState z{w.current[0].f, w.current[0].n};
  UNROLL for (int i = 1; i < LANE_ROWS; i++)
    if (q == i) z = StoredState{w.current[i].f, w.current[i].n};
  return z;
}
#define STATE_SLOTS (2 * LANE_ROWS)
DEVICE void store_walker(StoredState* slots, const Walker& w) {
  UNROLL for (int q = 0; q < LANE_ROWS; q++) slots[q * 32 + lane_index()] = StoredState{w.current[q].f, w.current[q].n};
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++)
    slots[(LANE_ROWS + q) * 32 + lane_index()] = StoredState{w.previous[q].f, w.previous[q].n};
  slots[(2 * LANE_ROWS - 1) * 32 + lane_index()] = StoredState{w.above.f, w.above.n};
}
DEVICE Walker load_walker(const StoredState* slots) {
  Walker w = fresh_walker();
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    StoredState v = slots[q * 32 + lane_index()];
    w.current[q] = Scaled{v.f, v.n};
  }
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) {
    StoredState v = slots[(LANE_ROWS + q) * 32 + lane_index()];
    w.previous[q] = Scaled{v.f, v.n};
  }
  StoredState v = slots[(2 * LANE_ROWS - 1) * 32 + lane_index()];
  w.above = Scaled{v.f, v.n};
  return w;
}
// Checkpoints and bottom rows are kept from the band's first column on. A strip's first checkpoint is where its walk
// starts, so it is known and not kept.
DEVICE i32 first_checkpoint(const Strip& s) { return s.first_column / CHECKPOINT; }
DEVICE Walker first_walker(const Strip& s) {
  Walker w = fresh_walker();
  if (s.index == 0 && lane_index() == 0) w.above = one();
  return w;
}
DEVICE StoredState* saved_state(const Params& p, const Strip& s, i32 checkpoint) {
  StoredState* states = (StoredState*)(p.states + s.pair * p.pair_bytes);
  return states + ((i64)s.index * p.checkpoints + checkpoint - first_checkpoint(s) - 1) * (STATE_SLOTS * 32);
}
DEVICE void keep_walker(const Params& p, const Strip& s, i32 checkpoint, const Walker& w) {
  if (p.save && checkpoint > first_checkpoint(s)) store_walker(saved_state(p, s, checkpoint), w);
}
DEVICE Walker kept_walker(const Params& p, const Strip& s, i32 checkpoint) {
  return checkpoint > first_checkpoint(s) ? load_walker(saved_state(p, s, checkpoint)) : first_walker(s);
}
// Strip `index`'s bottom row, to be indexed by column.
DEVICE StoredState* saved_bound(const Params& p, const Strip& s, i32 index) {
  i32 first = (index + 1) * STRIP_ROWS - 1 - s.bandwidth;
  return (StoredState*)(p.bounds + s.pair * p.pair_bytes) + (i64)index * p.bound_columns - (first > 0 ? first : 0);
}

// One step of (5, 6). `top` is the row above the strip, for lane 0. Calls keep(q, terms, sum) for each row's cell.
// Rows from the last to the first, so that a row still finds the row above it as it was one step ago.
template <int Q, class Keep>
DEVICE void advance_rows(Walker& w, const real (&cost)[LANE_ROWS], const Scaled& up, Keep keep) {
  Scaled above = up, diagonal = w.above;
  if constexpr (Q > 0) { above = w.current[Q - 1]; diagonal = w.previous[Q - 1]; }
  Terms t = align(above, w.current[Q], diagonal);
  real sum = sum_of(t);
  keep(Q, t, sum);
  w.previous[Q] = w.current[Q];
  w.current[Q] = times(sum, t.m, weight_of(cost[Q]));
  if constexpr (Q > 0) advance_rows<Q - 1>(w, cost, up, keep);
}
template <class Keep>
DEVICE void advance(Walker& w, const real (&cost)[LANE_ROWS], const StoredState& top, Keep keep) {
  Scaled up{from_lane_above(w.current[LANE_ROWS - 1].f), from_lane_above(w.current[LANE_ROWS - 1].n)};
  if (lane_index() == 0) up = Scaled{top.f, top.n};
  advance_rows<LANE_ROWS - 1>(w, cost, up, keep);
  w.above = up;
}
// Both anti-diagonals: along a diagonal path every other one is never anybody's left or upper neighbour.
DEVICE void renormalize(Walker& w) {
  UNROLL for (int q = 0; q < LANE_ROWS; q++) renormalize(w.current[q]);
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) renormalize(w.previous[q]);
  renormalize(w.above);
}

// Build-time answers, to compile a loop body with and without a rare case.
struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };
