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

// ---- checkpoints
#if PACKED
// Four cells of a lane in 22 bytes instead of 32. A renormalised f has 23 bits to keep, the first cell's n takes 30 and
// the others' differences from it 17 each: nothing is lost. Cells that are further apart than that take 24 bits and leave
// 18 to f: costs that put them there are rounded to far less by float32 itself. Beyond 24 bits the walk is flagged.
// 32-bit words, the f of a cell above the low part of its difference; the high parts of all three above one another, half
// of them in `rest` and half below the first cell's f.
static_assert(LANE_ROWS == 2 && !WIDE && !BANDED, "unbanded, a lane's first cell has no path only where none has");
#define NO_PATH_FROM (5 << 27)  // flagged walks end at 2^29; no path gets above that and back by 2^27
#define FIRST_BIAS (1 << 27)
#define FIRST_MASK 0x3fffffffu
struct SavedStates {
  Word4 cells[32];
  u32 first[32];  // n of the first cell, and in bit 30 whether differences are long
  u16 rest[32];
};
struct Packing { u32 low, high; };  // bits of a difference beside its f, and elsewhere
DEVICE Packing packing_of(bool far) { return far ? Packing{14u, 10u} : Packing{9u, 8u}; }
DEVICE u32 low_bits(u32 v, u32 count) { return v & ((1u << count) - 1u); }
// False when the numbers do not fit.
DEVICE bool store_walker(SavedStates* to, const Walker& w) {
  const Scaled cells[4] = {w.current[0], w.current[1], w.previous[0], w.above};
  const i32 first = cells[0].n;
  u32 away = 0;  // at least as large as the largest difference, in magnitude
  UNROLL for (int i = 1; i < 4; i++) {
    const i32 difference = cells[i].n - first;
    if (cells[i].n < NO_PATH_FROM) away |= (u32)(difference < 0 ? -difference : difference);
  }
  const bool far = away >= 65535u;
  const Packing bits = packing_of(far);
  const u32 bias = 1u << (bits.low + bits.high - 1u);
  u32 words[4], elsewhere = 0;
  UNROLL for (int i = 3; i >= 1; i--) {
    const u32 difference = cells[i].n < NO_PATH_FROM ? (u32)(cells[i].n - first) + bias : 2u * bias - 1u;
    words[i] = (bits_of(cells[i].f) << 9 >> bits.low << bits.low) | low_bits(difference, bits.low);
    elsewhere = elsewhere << bits.high | low_bits(difference >> bits.low, bits.high);
  }
  words[0] = (bits_of(cells[0].f) << 9 >> bits.low << bits.low) | elsewhere >> 16;
  to->cells[lane_index()] = Word4{words[0], words[1], words[2], words[3]};
  to->first[lane_index()] = (first < NO_PATH_FROM ? (u32)(first + FIRST_BIAS) : FIRST_MASK) | (far ? 1u << 30 : 0u);
  to->rest[lane_index()] = (u16)elsewhere;
  return away < 8388607u;
}
DEVICE Walker load_walker(const SavedStates* from) {
  const Word4 v = from->cells[lane_index()];
  const u32 word = from->first[lane_index()], rest = from->rest[lane_index()];
  const Packing bits = packing_of(word >> 30 & 1u);
  const i32 bias = 1 << (bits.low + bits.high - 1u);
  const i32 first = (word & FIRST_MASK) == FIRST_MASK ? NO_PATH : (i32)(word & FIRST_MASK) - FIRST_BIAS;
  const u32 words[4] = {v.a, v.b, v.c, v.d};
  const u32 lost = bits.low > 9u ? 16u : 0u;  // the middle of what was cut off
  Scaled cells[4];
  u32 elsewhere = rest | low_bits(v.a, bits.low) << 16;
  UNROLL for (int i = 0; i < 4; i++) {
    cells[i].f = float_of(words[i] >> bits.low << bits.low >> 9 | 0x3f800000u | lost);
    cells[i].n = first;
    if (i > 0) {
      const i32 difference = (i32)(low_bits(words[i], bits.low) | low_bits(elsewhere, bits.high) << bits.low);
      cells[i].n = difference == 2 * bias - 1 ? NO_PATH : first + difference - bias;
      elsewhere >>= bits.high;
    }
  }
  Walker w = fresh_walker();
  w.current[0] = cells[0];
  w.current[1] = cells[1];
  w.previous[0] = cells[2];
  w.above = cells[3];
  return w;
}
#else
#define STATE_SLOTS (2 * LANE_ROWS)
struct SavedStates { StoredState slots[STATE_SLOTS * 32]; };
DEVICE bool store_walker(SavedStates* to, const Walker& w) {
  StoredState* slots = to->slots;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) slots[q * 32 + lane_index()] = StoredState{w.current[q].f, w.current[q].n};
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++)
    slots[(LANE_ROWS + q) * 32 + lane_index()] = StoredState{w.previous[q].f, w.previous[q].n};
  slots[(2 * LANE_ROWS - 1) * 32 + lane_index()] = StoredState{w.above.f, w.above.n};
  return true;
}
DEVICE Walker load_walker(const SavedStates* from) {
  const StoredState* slots = from->slots;
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
#endif
// Checkpoints and bottom rows are kept from the band's first column on. A strip's first checkpoint is where its walk
// starts, so it is known and not kept.
DEVICE i32 first_checkpoint(const Strip& s) { return s.first_column / CHECKPOINT; }
DEVICE Walker first_walker(const Strip& s) {
  Walker w = fresh_walker();
  if (s.index == 0 && lane_index() == 0) w.above = one();
  return w;
}
DEVICE SavedStates* saved_state(const Params& p, const Strip& s, i32 checkpoint) {
  SavedStates* states = (SavedStates*)(p.states + s.pair * p.pair_bytes);
  return states + ((i64)s.index * p.checkpoints + checkpoint - first_checkpoint(s) - 1);
}
// False when the walk's numbers cannot be kept.
DEVICE bool keep_walker(const Params& p, const Strip& s, i32 checkpoint, const Walker& w) {
  return !p.save || checkpoint == first_checkpoint(s) || store_walker(saved_state(p, s, checkpoint), w);
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
