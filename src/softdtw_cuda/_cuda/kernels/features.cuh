// Features: the rows of x and y, in memory.
#pragma once

struct Features {
  const element* rows;
  i32 count;            // valid rows
  i32 d;
};
DEVICE Features features_x(const Params& p, const Strip& s) {
  return Features{x_of(p, s), s.n, p.d};
}
DEVICE Features features_y(const Params& p, const Strip& s) {
  return Features{y_of(p, s), s.m, p.d};
}
// Rows past the end repeat the last one: their costs must stay in range, though no path goes through them.
DEVICE float feature(const Features& f, i32 row, i32 k) {
  return k < f.d ? to_float(f.rows[(i64)(row < f.count ? row : f.count - 1) * f.d + k]) : 0.0f;
}
