// The lanes of a warp walking a strip, one anti-diagonal per step.
//
//   (5, 6)  Z_ij = w_ij (Z_{i-1,j-1} + Z_{i-1,j} + Z_{i,j-1}),   Z = f 2^-n,   Z_00 = 1, no path from any other border
//
// A strip is STRIP_ROWS rows of one pair; lane t has rows t * LANE_ROWS and on. At step s row r of the strip is at
// column s - r, so a step is one anti-diagonal: "up" is the row above one step ago, "diagonal" is the row above two
// steps ago, "left" is the row itself one step ago. All cells of a step are independent of each other, and every one
// depends only on the two steps before: the order is legal. Rows of other strips come through the hand-off row.
// Cells left of column 0 stay "no path" by themselves; cells right of the last column and below the last row are
// computed from whatever is there and never reach a real cell, since paths only go right and down.
#pragma once

// Two anti-diagonals: what a lane must remember from one step to the next.
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

// One step of (5, 6). `top` is the row above the strip, for lane 0. Calls keep(q, terms, sum) for each row's cell.
// Rows from the last to the first, so that a row still finds the row above it as it was one step ago.
template <int Q, class Keep>
DEVICE void advance_rows(Walker& w, const real (&cost)[LANE_ROWS], const Scaled& up, Keep keep) {
  Scaled above = up, diagonal = w.above;
  if constexpr (Q > 0) { above = w.current[Q - 1]; diagonal = w.previous[Q - 1]; }
  Terms t = terms_of(above, w.current[Q], diagonal);
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

#if WIDE
#define UNROLL_STEPS UNROLL_BY(1)  // rarely run: smaller code, quicker to compile, and rare cases are not set apart
#else
#define UNROLL_STEPS UNROLL
#endif
// Steps 0 to `steps` of a stretch, GROUP of them at a time. `inputs` says what a step needs:
//   read(first)   what a group reads from shared memory, read before any of its steps writes there: a store in between
//                 would hold every later load back until its own value is known
//   costs(cost, group, first, k), top(group, first, k)   the costs and the row above of step first + k
// keep(q, terms, sum) sees each row's cell, after(step) follows each step.
template <int GROUP = 8, class Inputs, class Keep, class After>
DEVICE void walk(Walker& w, i32 steps, Inputs& inputs, Keep keep, After after) {
  UNROLL_BY(1) for (i32 first = 0; first < steps; first += GROUP) {
    const auto group = inputs.read(first);
    UNROLL_STEPS for (i32 k = 0; k < GROUP; k++) {
      real cost[LANE_ROWS];
      inputs.costs(cost, group, first, k);
      advance(w, cost, inputs.top(group, first, k), keep);
      after(first + k);
    }
    if (GROUP == 8 ? first & 8 : ((first + GROUP) & 15) == 0) renormalize(w);
  }
}
