// Costs of univariate series, three instructions each, computed at the step that needs them.
#pragma once

// The lane's own x and the y of its column, which moves down one row per step.
struct Costs {
  float x[LANE_ROWS], y[LANE_ROWS];
  float scale;
};
DEVICE Costs open_costs(const Params& p, const Strip& s) {
  Costs c;
  c.scale = (float)p.scale;
  const element* x = x_of(p, s);
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    i32 row = s.first_row + (i32)lane_index() * LANE_ROWS + q;
    // Rows and columns outside the series get an ordinary value: their cells must stay within the range of (6), though
    // no path goes through them.
    c.x[q] = to_float(x[row < s.n ? row : 0]);
    c.y[q] = 0.0f;
  }
  return c;
}
DEVICE void step_costs(real (&cost)[LANE_ROWS], Costs& c, float y, const Strip& s, i32 step) {
  UNROLL for (int q = LANE_ROWS - 1; q > 0; q--) c.y[q] = c.y[q - 1];
  c.y[0] = y;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    float difference = c.x[q] - c.y[q];
    cost[q] = (difference * difference) * c.scale;  // in this order a difference without rounding costs one rounding
    if constexpr (BANDED) {
      i32 row = (i32)lane_index() * LANE_ROWS + q;
      i32 offset = step - row - row - s.first_row + s.bandwidth;  // column - row + bandwidth
      cost[q] = (u32)offset <= 2u * (u32)s.bandwidth ? cost[q] : 2.0f * FORBIDDEN_FROM;
    }
  }
}

// What the walker needs; see walk(). `y_at` points at the y of column 0 in a window that reaches back STRIP_ROWS columns.
struct UnivariateSteps {
  Costs& own;
  const Strip& s;
  const float* y_at;
  i32 start;  // the step of the stretch's first
  const StoredState* above;
  struct Eight { StoredState top[8]; float y[8]; };
  METHOD void seek() {
    UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) own.y[q] = y_at[start - 1 - (i32)lane_index() * LANE_ROWS - q];
  }
  METHOD Eight read(i32 first) const {
    Eight ahead;
    UNROLL for (int k = 0; k < 8; k++) ahead.top[k] = above[first + k];
    UNROLL for (int k = 0; k < 8; k++) ahead.y[k] = y_at[start + first + k - (i32)lane_index() * LANE_ROWS];
    return ahead;
  }
  METHOD void costs(real (&cost)[LANE_ROWS], const Eight& eight, i32 first, i32 k) { step_costs(cost, own, eight.y[k], s, start + first + k); }
  METHOD const StoredState& top(const Eight& eight, i32, i32 k) const { return eight.top[k]; }
};

// The rounding trick needs s < 2^21: with |x - r|, |y - r| < 724 / sqrt(scale) for a common r that holds.
DEVICE bool out_of_range(float v, float reference, float scale) {
  float difference = v - reference;
  return !(difference * difference * scale < 524288.0f);
}
