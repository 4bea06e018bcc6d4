// Costs and Omega of the cells of a chunk, by a group of threads.
//
// A chunk is STEPS steps of a strip: 32 rows, and columns `base` - 31 to `base` + STEPS - 1. Features come in slices of DIMS
// from global to shared memory; distances are sums of squared differences, which keep every digit of nearly equal series.
#pragma once

// A slice of rows of features. Units of four move around in a row, so that lanes four rows apart meet no bank twice.
#define UNITS (DIMS / 4)
DEVICE i32 unit_at(i32 row, i32 unit) { return row * DIMS + 4 * ((unit + (row >> 2)) & (UNITS - 1)); }
struct alignas(16) Four { real v[4]; };
DEVICE Four four_at(const real* slice, i32 row, i32 unit) { return *(const Four*)(slice + unit_at(row, unit)); }

// A thread's part of a slice of ROWS rows from `start` on, from memory: zeros beyond `count` rows and d features. Loads of a
// slice come before its stores, so that their latencies overlap.
template <int ROWS, int THREADS> struct Fetched { Four part[ROWS * UNITS / THREADS]; };
template <int ROWS, int THREADS>
DEVICE void fetch(Fetched<ROWS, THREADS>& to, const element* series, i32 start, i32 count, i32 d, i32 first, bool whole, i32 thread) {
  static_assert(ROWS * UNITS % THREADS == 0, "as much for every thread");
  UNROLL for (int j = 0; j < ROWS * UNITS / THREADS; j++) {
    const i32 i = thread + j * THREADS, own = start + i / UNITS, feature = first + i % UNITS * 4;
    const element* from = series + (i64)own * d + feature;
    const bool there = series && own >= 0 && own < count;
    Four v = {};
    if (whole) {
      if (there && feature < d) v = *(const Four*)from;
    } else {
      UNROLL for (int c = 0; c < 4; c++)
        if (there && feature + c < d) v.v[c] = from[c];
    }
    to.part[j] = v;
  }
}
template <int ROWS, int THREADS> DEVICE void put_slice(real* slice, const Fetched<ROWS, THREADS>& from, i32 thread) {
  UNROLL for (int j = 0; j < ROWS * UNITS / THREADS; j++) {
    const i32 i = thread + j * THREADS;
    *(Four*)(slice + unit_at(i / UNITS, i % UNITS)) = from.part[j];
  }
}
// Units of four features in the slice from `first` on.
DEVICE i32 units_of(i32 d, i32 first) { return d - first >= DIMS ? UNITS : (d - first + 3) / 4; }

DEVICE const element* a_of(const Params& p, const Strip& s) { return p.a ? (const element*)p.a + s.pair * p.a_stride : nullptr; }
DEVICE const element* b_of(const Params& p, const Strip& s) { return p.b ? (const element*)p.b + s.pair * p.b_stride : nullptr; }

template <int STEPS> struct Slices {
  alignas(16) real left[32 * DIMS];
  alignas(16) real right[(STEPS + 32) * DIMS];  // row j is column base - 31 + j
};
template <int STEPS> struct CostShared {
  Slices<STEPS> series;
#if KIND == TANGENTS
  Slices<STEPS> tangents;
#endif
};

// Two lanes have four rows and of each four steps: each sums every other unit of the features, then keeps two of the rows.
// Four loads of rows and seven of columns are for sixteen cells, so that arithmetic and not shared memory is the limit.
struct Cells { i32 row, step; };  // first row and first step
DEVICE Cells shared_cells_of(i32 thread) {
  const i32 lane = thread & 31, warp = thread >> 5;
  return Cells{4 * ((warp & 3) * 2 + ((lane >> 3) & 1)), 4 * ((warp >> 2) * 8 + (lane & 7))};
}
DEVICE i32 half_of(i32 thread) { return (thread >> 4) & 1; }
// The rows that are kept: two of them, [i][k] is row i at step `step` + k of the chunk.
DEVICE Cells cells_of(i32 thread) {
  const Cells both = shared_cells_of(thread);
  return Cells{both.row + 2 * half_of(thread), both.step};
}
// What both lanes found.
DEVICE void join_halves(real (&to)[2][4], const real (&own)[4][4], i32 thread) {
  const bool second = half_of(thread);
  UNROLL for (int i = 0; i < 2; i++)
    UNROLL for (int k = 0; k < 4; k++) {
      const real other = from_lane_xor(second ? own[i][k] : own[i + 2][k], 16);
      to[i][k] = (second ? own[i + 2][k] : own[i][k]) + other;
    }
}
// Slices of both sides of a chunk, by 4 * STEPS threads.
template <int STEPS> struct FetchedPair {
  Fetched<32, 4 * STEPS> left;
  Fetched<STEPS + 32, 4 * STEPS> right;
};
template <int STEPS>
DEVICE FetchedPair<STEPS> fetch_pair(const Params& p, const Strip& s, const element* left, const element* right, i32 base, i32 d, i32 first, i32 thread) {
  FetchedPair<STEPS> to;
  fetch(to.left, left, s.first_row, s.n, d, first, p.whole_units, thread);
  fetch(to.right, right, base - 31, s.m, d, first, p.whole_units, thread);
  return to;
}
template <int STEPS> DEVICE void put_pair(Slices<STEPS>& slices, const FetchedPair<STEPS>& from, i32 thread) {
  put_slice(slices.left, from.left, thread);
  put_slice(slices.right, from.right, thread);
}
// One unit's part of the sums: squared distances of the series; with TANGENT their products with those of the tangents.
template <bool TANGENT, int STEPS>
DEVICE void add_unit(real (&cost)[4][4], real (&omega)[4][4], const CostShared<STEPS>& shared, const Cells& cells, i32 unit) {
  // Rows and columns begin at multiples of four, of which units lie alike: three addresses are enough.
  const i32 first = cells.step - cells.row + 28;  // the column of the last row at the first step
  const i32 row_at = unit_at(cells.row, unit), near_at = unit_at(first, unit), far_at = unit_at(first + 4, unit) - 4 * DIMS;
  Four left[4], left_change[4];
  UNROLL for (int i = 0; i < 4; i++) {
    left[i] = *(const Four*)(shared.series.left + row_at + i * DIMS);
#if KIND == TANGENTS
    if (TANGENT) left_change[i] = *(const Four*)(shared.tangents.left + row_at + i * DIMS);
#endif
  }
  UNROLL for (int column = 0; column < 7; column++) {
    const i32 at = (column < 4 ? near_at : far_at) + column * DIMS;
    const Four right = *(const Four*)(shared.series.right + at);
    Four right_change = {};
#if KIND == TANGENTS
    if (TANGENT) right_change = *(const Four*)(shared.tangents.right + at);
#endif
    UNROLL for (int i = 0; i < 4; i++) {
      const int k = column + i - 3;
      if (k < 0 || k > 3) continue;
      real v[4];
      UNROLL for (int c = 0; c < 4; c++) v[c] = left[i].v[c] - right.v[c];
      // Four at a time: a sum of few terms of one size rounds less than one term after the other does.
      cost[i][k & 3] += multiply_add(v[3], v[3], multiply_add(v[2], v[2], multiply_add(v[1], v[1], v[0] * v[0])));
      if (TANGENT)
        UNROLL for (int c = 0; c < 4; c++)
          omega[i][k & 3] = multiply_add(v[c], left_change[i].v[c] - right_change.v[c], omega[i][k & 3]);
    }
  }
}
// Slices of series and tangents are fetched together, so that their latencies overlap; from compute capability 10.0 on that would
// spill registers of the backward.
#define FETCH_TOGETHER (__CUDA_ARCH__ < 1000)
template <bool TANGENT, int STEPS>
DEVICE void add_slices(real (&cost)[2][4], real (&omega)[2][4], CostShared<STEPS>& shared, const Params& p, const Strip& s, const element* left,
                       const element* right, i32 d, i32 base, u32 barrier, i32 thread) {
  const Cells cells = shared_cells_of(thread);
  real costs[4][4] = {}, omegas[4][4] = {};
  for (i32 first = 0; first < d; first += DIMS) {
    const i32 units = units_of(d, first);
    {
      const FetchedPair<STEPS> series = fetch_pair<STEPS>(p, s, left, right, base, d, first, thread);
#if KIND == TANGENTS && FETCH_TOGETHER
      const FetchedPair<STEPS> tangents = fetch_pair<STEPS>(p, s, a_of(p, s), b_of(p, s), base, d, first, thread);
#endif
      group_barrier(barrier, 4 * STEPS);
      put_pair(shared.series, series, thread);
#if KIND == TANGENTS && FETCH_TOGETHER
      put_pair(shared.tangents, tangents, thread);
#endif
    }
#if KIND == TANGENTS && !FETCH_TOGETHER
    put_pair(shared.tangents, fetch_pair<STEPS>(p, s, a_of(p, s), b_of(p, s), base, d, first, thread), thread);
#endif
    group_barrier(barrier, 4 * STEPS);
    UNROLL_BY(1) for (i32 unit = half_of(thread); unit < units; unit += 2) add_unit<TANGENT>(costs, omegas, shared, cells, unit);
  }
  join_halves(cost, costs, thread);
  if (TANGENT) {
    join_halves(omega, omegas, thread);
    UNROLL for (int i = 0; i < 2; i++)
      UNROLL for (int k = 0; k < 4; k++) omega[i][k] *= (real)2;
  }
}

// By 4 * STEPS threads, which have `barrier` for themselves.
template <int STEPS>
DEVICE void make_entries(Entry* entries, CostShared<STEPS>& shared, const Params& p, const Strip& s, i32 base, u32 barrier, i32 thread) {
  real cost[2][4] = {}, omega[2][4] = {};
  if constexpr (MODE != COST_MATRIX)
    add_slices<KIND == TANGENTS>(cost, omega, shared, p, s, x_of(p, s), y_of(p, s), p.d, base, barrier, thread);
  if constexpr (KIND == FEATURES) add_slices<false>(omega, cost, shared, p, s, a_of(p, s), b_of(p, s), p.f, base, barrier, thread);
  const Cells cells = cells_of(thread);
  const double inverse = 1.0 / ((double)s.n * (double)s.m);
  UNROLL for (int i = 0; i < 2; i++)
    UNROLL for (int k = 0; k < 4; k++) {
      const i32 row = s.first_row + cells.row + i, step = cells.step + k, column = base + step - cells.row - i;
      const bool there = row < s.n && in_band(s, row, column);
      const i64 at = (i64)row * p.m + column;
      Weight w = forbidden();
      real change = 0;
      if (there) {
        if constexpr (MODE == COST_MATRIX) cost[i][k] = ((const element*)p.x + s.pair * p.x_stride)[at];
        w = weight_of((double)cost[i][k] * p.scale);
        if constexpr (KIND == MATRIX) {
          change = a_of(p, s)[at];
        } else if constexpr (KIND == POSITION) {
          const double offset = (double)((i64)(row + 1) * s.m - (i64)(column + 1) * s.n) * inverse;
          change = (real)(offset * offset);
        } else {
          change = omega[i][k];
        }
      }
      // Where no path goes Omega does not matter, whatever it is.
      entries[step * 32 + cells.row + i] = Entry{w.n, w.v, w.n == NO_PATH ? (real)0 : change};
    }
}
