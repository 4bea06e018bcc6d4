// The lanes of a warp walking a strip of 32 rows, one anti-diagonal per step: eqs. (5), (6) and (12) to (14).
//
// At step s row r of the strip is at column s - r: "up" is the row above one step ago, "diagonal" the row above two steps
// ago, "left" the row itself one step ago. A cell's weight and Omega come from `Entry`; those outside the matrix or the
// band have no path and Omega = 0.
#pragma once

struct alignas(sizeof(real) == 4 ? 16 : 8) Entry { i64 n; real v, omega; };  // of a cell: its weight (6), its Omega

struct Walker {
  Scaled current;  // the row's last cell
  Scaled above;    // the row above, two steps ago: the next diagonal
  real u, v;       // of the row's last cell: the derivative of R less that of the cell above, less that of the cell on the left
  real total, total_above;  // the derivative of R itself, for <E, Omega> alone
};
DEVICE Walker first_walker(const Strip& s) {
  Walker w{no_path(), no_path(), (real)0, (real)0, (real)0, (real)0};
  if (s.index == 0 && lane_index() == 0) w.above = Scaled{(real)1, 0};
  return w;
}
struct Slopes { real up, left, diagonal; };  // mu of (13)
DEVICE Slopes slopes_of(const Shares& share, real b, real c) {
  const real turn = c - b;
  return Slopes{multiply_add(share.left, turn, -share.diagonal * b), multiply_add(-share.up, turn, -share.diagonal * c),
                multiply_add(share.up, b, share.left * c)};
}
// `top` is the row above the strip, for lane 0. keep(shares, b, c) sees the cell. TOTAL: follow the derivative of R, too.
template <bool TOTAL, class Keep> DEVICE void advance(Walker& w, const Entry& entry, const Above& top, Keep keep) {
  Above up;
  up.z = Scaled{from_lane_above(w.current.f), from_lane_above(w.current.n)};
  up.v = from_lane_above(w.v);
  if (TOTAL) up.total = from_lane_above(w.total);
  if (lane_index() == 0) up = top;
  const Terms t = terms_of(up.z, w.current, w.above);
  const Shares share = shares_of(t);
  const real b = up.v, c = w.u;
  keep(share, b, c);
  const Slopes slope = slopes_of(share, b, c);
  if (TOTAL) {
    // (9): a mean of the predecessors, in which nothing cancels. Only differences of it would lose digits.
    real mean = multiply_add(share.up, up.total, multiply_add(share.left, w.total, share.diagonal * w.total_above));
    w.total = entry.omega + mean;
    w.total_above = up.total;
  }
  w.u = entry.omega + slope.up;
  w.v = entry.omega + slope.left;
  w.current = times(t, Weight{entry.v, entry.n});
  w.above = up.z;
}
// Steps that are read from shared memory together, before any of them stores there: a store in between would hold every later
// load back until its own value is known.
#define GROUP_STEPS 4
DEVICE void renormalize(Walker& w) {
  renormalize(w.current);
  renormalize(w.above);
}

// Checkpoints: a walker in memory, every CHECKPOINT steps from the strip's first. The first is where the walk starts, and not
// kept. And the saved bottom row of each strip.
struct SavedStates {
  i64 n[32], above_n[32];
  real f[32], above_f[32], u[32], v[32];
};
struct alignas(sizeof(real) == 4 ? 16 : 8) SavedBound { i64 n; real f, v; };
DEVICE i32 first_checkpoint(const Strip& s) { return s.first_column / CHECKPOINT; }
DEVICE SavedStates* saved_state(const Params& p, const Strip& s, i32 checkpoint) {
  SavedStates* states = (SavedStates*)(p.states + s.pair * p.pair_bytes);
  return states + ((i64)s.index * p.checkpoints + checkpoint - first_checkpoint(s) - 1);
}
DEVICE void save_checkpoint(const Params& p, const Strip& s, i32 checkpoint, const Walker& w) {
  if (!p.save || checkpoint == first_checkpoint(s)) return;
  SavedStates* to = saved_state(p, s, checkpoint);
  const u32 lane = lane_index();
  to->n[lane] = w.current.n;
  to->above_n[lane] = w.above.n;
  to->f[lane] = w.current.f;
  to->above_f[lane] = w.above.f;
  to->u[lane] = w.u;
  to->v[lane] = w.v;
}
DEVICE Walker load_checkpoint(const Params& p, const Strip& s, i32 checkpoint) {
  Walker w = first_walker(s);
  if (checkpoint == first_checkpoint(s)) return w;
  const SavedStates* from = saved_state(p, s, checkpoint);
  const u32 lane = lane_index();
  w.current = Scaled{from->f[lane], from->n[lane]};
  w.above = Scaled{from->above_f[lane], from->above_n[lane]};
  w.u = from->u[lane];
  w.v = from->v[lane];
  return w;
}
// Strip `index`'s bottom row, to be indexed by column.
DEVICE SavedBound* saved_bound(const Params& p, const Strip& s, i32 index) {
  const i32 first = (index + 1) * STRIP_ROWS - 1 - s.bandwidth;
  return (SavedBound*)(p.bounds + s.pair * p.pair_bytes) + (i64)index * p.bound_columns - (first > 0 ? first : 0);
}
