// Costs of narrow features: a lane has its rows of x in registers, and the columns of y that 32 steps touch are in shared
// memory. DIMS is the number of features, padded with zeros to 2, 4, 8 or 16.
#pragma once

#define VECTOR (DIMS < 4 ? DIMS : 4)
#define VECTORS (DIMS / VECTOR)
#define WINDOW 128  // columns of y in shared memory: a power of two, and at least what 32 steps touch
static_assert(WINDOW >= STRIP_ROWS + 32, "the window is too short");
struct alignas(4 * VECTOR) Vector { float v[VECTOR]; };
typedef Vector Window[VECTORS][WINDOW];
struct Point { float v[DIMS]; };  // the features of one step of a series

// Lanes are LANE_ROWS columns apart: even and odd columns lie apart, so that no two lanes meet in a bank.
DEVICE i32 place_of(i32 column) {
  const u32 c = (u32)column & (WINDOW - 1);
  return (i32)(LANE_ROWS == 2 ? (c >> 1) | (c & 1u) * (WINDOW / 2) : c);
}
DEVICE Point features_at(const Window& window, i32 column) {
  Point y;
  UNROLL for (int i = 0; i < VECTORS; i++) {
    const Vector part = window[i][place_of(column)];
    UNROLL for (int k = 0; k < VECTOR; k++) y.v[i * VECTOR + k] = part.v[k];
  }
  return y;
}
DEVICE void put_features(Window& window, i32 column, const Point& y) {
  UNROLL for (int i = 0; i < VECTORS; i++) {
    Vector part;
    UNROLL for (int k = 0; k < VECTOR; k++) part.v[k] = y.v[i * VECTOR + k];
    window[i][place_of(column)] = part;
  }
}
// Row `row` of a series of `count` rows; rows outside repeat the nearest, so that their costs stay in range, though no
// path goes through them.
DEVICE Point read_features(const element* series, i32 row, i32 count, i32 d) {
  const element* from = series + (i64)(row < 0 ? 0 : row < count ? row : count - 1) * d;
  Point f;
  UNROLL for (int k = 0; k < DIMS; k++) f.v[k] = k < d ? to_float(from[k]) : 0.0f;
  return f;
}
DEVICE float squared_distance(const Point& x, const Point& y) {
  float sum = 0.0f, lost = 0.0f;
  UNROLL for (int k = 0; k < DIMS; k++) {
    const float difference = x.v[k] - y.v[k];
    if constexpr (DIMS > 4) {
      // Kahan's sum: the last bits of a distance decide between nearly equal paths. Four plain sums take
      // fewer instructions, but put 2 of 180 cases of the error budget beyond it, one of them 1.7 times.
      const float term = multiply_add(difference, difference, -lost), total = sum + term;
      lost = (total - sum) - term;
      sum = total;
    } else {
      sum = multiply_add(difference, difference, sum);
    }
  }
  return sum;
}
// The rounding of (6) needs s < 2^21, which holds where x and y are both within 724 / sqrt(scale) of one point.
DEVICE bool out_of_range(const Point& v, const Point& reference, float scale) {
  return !(squared_distance(v, reference) * scale < 524288.0f);
}

// The lane's rows, and the columns that they are at.
struct LaneSeries { Point x[LANE_ROWS], y[LANE_ROWS]; };
DEVICE void read_rows(LaneSeries& own, const Params& p, const Strip& s) {
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    own.x[q] = read_features(x_of(p, s), s.first_row + (i32)lane_index() * LANE_ROWS + q, s.n, p.d);
}

// What the walker needs; see walk(). A step brings the first row to a new column, and the others to where the row above
// them was.
struct FeatureSteps {
  LaneSeries& own;
  const Window& window;
  i32 start;  // the step of the stretch's first
  const StoredState* above;
  float scale;
  struct Group { StoredState top[PAIR_STEPS]; Point y[PAIR_STEPS]; };
  METHOD void seek() {
    UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) own.y[q] = features_at(window, start - 1 - (i32)lane_index() * LANE_ROWS - q);
  }
  METHOD Group read(i32 first) const {
    Group ahead;
    UNROLL for (int k = 0; k < PAIR_STEPS; k++) ahead.y[k] = features_at(window, start + first + k - (i32)lane_index() * LANE_ROWS);
    UNROLL for (int k = 0; k < PAIR_STEPS; k++) ahead.top[k] = above[first + k];
    return ahead;
  }
  METHOD void costs(real (&cost)[LANE_ROWS], const Group& group, i32, i32 k) {
    UNROLL for (int q = LANE_ROWS - 1; q > 0; q--) own.y[q] = own.y[q - 1];
    own.y[0] = group.y[k];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) cost[q] = squared_distance(own.x[q], own.y[q]) * scale;
  }
  METHOD const StoredState& top(const Group& group, i32, i32 k) const { return group.top[k]; }
};
