// What the alignment E and its derivative (11) of a checkpoint's cells add to the gradients: (16), (17) and (19).
//
// Gradients are summed in memory, cell after cell of differences, in the order of the walk: a strip adds to columns of gY
// when the strip below it is done with them.
#pragma once

#define GRAD_THREADS (4 * CHECKPOINT)
#define GRAD_BARRIER 3
#define WEIGHT_STRIDE 33
#define WEIGHT_MARGIN 3  // steps of zeros on either side
struct Weights { real at[(CHECKPOINT + 2 * WEIGHT_MARGIN) * WEIGHT_STRIDE]; };  // [step + WEIGHT_MARGIN][row]
struct Marks { u64 steps[32]; };  // of each row, bit by bit, those at which either weight is not zero

#define GRAD_X_TILES (8 * UNITS)  // of four rows by four features
#define GRAD_X_PARTS (GRAD_THREADS / GRAD_X_TILES)
#define GRAD_X_STEPS (CHECKPOINT / GRAD_X_PARTS)
#define GRAD_Y_TILES ((CHECKPOINT + 32) / 4 * UNITS)  // of four columns by four features
static_assert(GRAD_Y_TILES <= GRAD_THREADS && GRAD_X_STEPS % 4 == 0, "a tile for each thread");
struct GradShared { Slices<CHECKPOINT> slices; };
struct PartialSums { Four at[GRAD_THREADS][4]; };

// Most cells have no weight: what a warp can leave out.
struct Marked {
  u32 steps;  // add_rows: bit g is set where a row of the warp has weight at steps 4 g to 4 g + 3 of its part
  u32 rows;   // add_columns: those that have weight in columns of the warp
};
DEVICE Marked marked_of(const Marks& marks, i32 thread) {
  const i32 lane = thread & 31, tile = (thread - lane) % GRAD_X_TILES / UNITS * 4, start = thread / GRAD_X_TILES * GRAD_X_STEPS;
  const u64 own = marks.steps[lane];
  const i32 many = 32 / UNITS * 4;  // rows or columns of a warp
  Marked marked{0, 0};
  UNROLL for (int g = 0; g < GRAD_X_STEPS / 4; g++)
    if (lanes_where(lane >= tile && lane < tile + many && (own >> (start + 4 * g) & 15))) marked.steps |= 1u << g;
  const i32 first = (thread - lane) / UNITS * 4 - 31 + lane;  // step of the lane's row in the first column
  const u64 window = (first >= 64 ? 0 : first >= 0 ? own >> first : own << -first) & (((u64)1 << many) - 1);
  marked.rows = lanes_where(window != 0);
  return marked;
}
// The tile's part of sum_j w_ij (l_i - r_j), for rows 4 R and on, of the steps of one part.
DEVICE void add_rows(Four (&sum)[4], const Slices<CHECKPOINT>& slices, const Weights& weights, u32 marked, i32 thread) {
  const i32 tile = thread % GRAD_X_TILES, unit = tile % UNITS, row = tile / UNITS * 4, start = thread / GRAD_X_TILES * GRAD_X_STEPS;
  UNROLL_BY(1) for (i32 g = 0; g < GRAD_X_STEPS / 4; g++) {
    if (!(marked >> g & 1)) continue;
    const i32 step = start + 4 * g, first = step - row + 28;  // the column of the last row at the first step
    const i32 row_at = unit_at(row, unit), near_at = unit_at(first, unit), far_at = unit_at(first + 4, unit) - 4 * DIMS;
    const real* w = weights.at + (step + WEIGHT_MARGIN) * WEIGHT_STRIDE + row;
    Four left[4];
    UNROLL for (int i = 0; i < 4; i++) left[i] = *(const Four*)(slices.left + row_at + i * DIMS);
    UNROLL for (int column = 0; column < 7; column++) {
      const Four right = *(const Four*)(slices.right + (column < 4 ? near_at : far_at) + column * DIMS);
      UNROLL for (int i = 0; i < 4; i++) {
        const int k = column + i - 3;
        if (k < 0 || k > 3) continue;
        const real weight = w[k * WEIGHT_STRIDE + i];
        UNROLL for (int c = 0; c < 4; c++) sum[i].v[c] = multiply_add(weight, left[i].v[c] - right.v[c], sum[i].v[c]);
      }
    }
  }
}
// The same of sum_i w_ij (r_j - l_i), for four columns.
DEVICE void add_columns(Four (&sum)[4], const Slices<CHECKPOINT>& slices, const Weights& weights, u32 marked, i32 thread) {
  if (thread >= GRAD_Y_TILES) return;
  const i32 unit = thread % UNITS, column = thread / UNITS * 4;  // base - 31 + column
  Four right[4];
  UNROLL for (int i = 0; i < 4; i++) right[i] = four_at(slices.right, column + i, unit);
  const i32 first = 28 - column > 0 ? 28 - column : 0, last = CHECKPOINT + 30 - column < 31 ? CHECKPOINT + 30 - column : 31;
  UNROLL_BY(1) for (i32 row = first; row <= last; row++) {
    if (!(marked >> row & 1)) continue;
    const Four left = four_at(slices.left, row, unit);
    const real* w = weights.at + (column - 31 + row + WEIGHT_MARGIN) * WEIGHT_STRIDE + row;
    UNROLL for (int i = 0; i < 4; i++)
      UNROLL for (int c = 0; c < 4; c++)
        sum[i].v[c] = multiply_add(w[i * WEIGHT_STRIDE], right[i].v[c] - left.v[c], sum[i].v[c]);
  }
}
DEVICE void add_to_memory(real* to, const Four& sum, real factor, i32 left) {
  UNROLL for (int c = 0; c < 4; c++) {
    if (c >= left) continue;
#if INPUT == FLOAT64
    to[c] = multiply_add(factor, sum.v[c], load_fresh(to + c));
#else
    add_to(to + c, factor * sum.v[c]);
#endif
  }
}

// Weights on differences of features: grad_left += 2 grad sum w (l - r), grad_right likewise. With `more` a second set of
// weights and features, of as many features, goes into the same gradients.
struct Contraction { const Weights* weights; const element *left, *right; };
template <int COUNT>
DEVICE void contract(const Contraction (&parts)[COUNT], i32 d, void* grad_left, void* grad_right, real factor, const Marks& marks, GradShared& shared,
                     PartialSums& partial, const Params& p, const Strip& s, i32 base, i32 thread) {
  if (!grad_left && !grad_right) return;
  for (i32 first = 0; first < d; first += DIMS) {
    const i32 units = units_of(d, first);
    const Marked marked = marked_of(marks, thread);
    Four rows[4] = {}, columns[4] = {};
    UNROLL for (int i = 0; i < COUNT; i++) {
      const FetchedPair<CHECKPOINT> fetched = fetch_pair<CHECKPOINT>(p, s, parts[i].left, parts[i].right, base, d, first, thread);
      group_barrier(GRAD_BARRIER, GRAD_THREADS);
      put_pair(shared.slices, fetched, thread);
      group_barrier(GRAD_BARRIER, GRAD_THREADS);
      if (thread % UNITS < units) {
        if (grad_left) add_rows(rows, shared.slices, *parts[i].weights, marked.steps, thread);
        if (grad_right) add_columns(columns, shared.slices, *parts[i].weights, marked.rows, thread);
      }
    }
    if (grad_left) UNROLL for (int i = 0; i < 4; i++) partial.at[thread][i] = rows[i];
    group_barrier(GRAD_BARRIER, GRAD_THREADS);
    if (grad_left)
      for (i32 i = thread; i < 4 * GRAD_X_TILES; i += GRAD_THREADS) {
        const i32 tile = i >> 2, which = i & 3, unit = tile % UNITS, row = s.first_row + tile / UNITS * 4 + which, left = d - first - 4 * unit;
        if (unit >= units || row >= s.n || left <= 0) continue;
        Four sum = partial.at[tile][which];
        for (i32 part = 1; part < GRAD_X_PARTS; part++)
          UNROLL for (int c = 0; c < 4; c++) sum.v[c] += partial.at[tile + part * GRAD_X_TILES][which].v[c];
        add_to_memory((real*)grad_left + ((i64)s.pair * p.n + row) * d + first + 4 * unit, sum, factor, left);
      }
    const i32 unit = thread % UNITS;
    if (grad_right && thread < GRAD_Y_TILES && unit < units && first + 4 * unit < d)
      UNROLL for (int i = 0; i < 4; i++) {
        const i32 column = base - 31 + thread / UNITS * 4 + i;
        if (column >= 0 && column < s.m)
          add_to_memory((real*)grad_right + ((i64)s.pair * p.m + column) * d + first + 4 * unit, columns[i], factor, d - first - 4 * unit);
      }
  }
}
// A table of the weights themselves: the gradient of a matrix.
DEVICE void store_table(const Weights& weights, void* to, real factor, const Params& p, const Strip& s, i32 base, i32 thread) {
  if (!to) return;
  for (i32 i = thread; i < 32 * CHECKPOINT; i += GRAD_THREADS) {
    const i32 row = i / CHECKPOINT, step = i % CHECKPOINT, own = s.first_row + row, column = base + step - row;
    if (own < s.n && in_band(s, own, column)) {
      const real w = weights.at[(step + WEIGHT_MARGIN) * WEIGHT_STRIDE + row];
      ((real*)to)[((i64)s.pair * p.n + own) * p.m + column] = w == (real)0 ? w : w * factor;
    }
  }
}
DEVICE void add_gradients(const Params& p, const Strip& s, const Weights& alignment, const Weights& slope, const Marks& marks, GradShared& shared, PartialSums& partial,
                          i32 base, i32 thread) {
  const real grad = (real)gradient_of_value(p, s.pair);
#if MODE == COST_MATRIX
  store_table(slope, p.grad_x, grad, p, s, base, thread);
#elif KIND == TANGENTS
  const Contraction both[2] = {{&slope, x_of(p, s), y_of(p, s)}, {&alignment, a_of(p, s), b_of(p, s)}};
  contract(both, p.d, p.grad_x, p.grad_y, (real)2 * grad, marks, shared, partial, p, s, base, thread);
#else
  const Contraction one[1] = {{&slope, x_of(p, s), y_of(p, s)}};
  contract(one, p.d, p.grad_x, p.grad_y, (real)2 * grad, marks, shared, partial, p, s, base, thread);
#endif
#if KIND == MATRIX
  store_table(alignment, p.grad_a, grad, p, s, base, thread);
#elif KIND == FEATURES
  const Contraction other[1] = {{&alignment, a_of(p, s), b_of(p, s)}};
  contract(other, p.f, p.grad_a, p.grad_b, (real)2 * grad, marks, shared, partial, p, s, base, thread);
#endif
}
