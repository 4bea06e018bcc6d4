// Geometry of one strip of one pair: STRIP_ROWS rows, and the columns that the band leaves them.
#pragma once

// Which series of x and of y a pair has.
struct Series { i32 x, y; };
DEVICE Series series_of(const Params& p, i32 pair) {
  if (!p.pairs) return Series{pair, pair};
  return Series{p.pairs[(i64)pair * 2], p.pairs[(i64)pair * 2 + 1]};
}

struct Strip {
  i32 pair, index;        // which
  Series series;          // of the pair
  i32 n, m;               // the pair's own lengths
  i32 first_row, last_row;
  i32 first_column, last_column;
  i32 bandwidth;
  bool valid;             // series, lengths and band make sense; false for every strip of a pair or for none
  bool present;           // the pair is long enough to have this strip
  bool is_last;           // holds the pair's last row
};

// Strip `index` of the same pair.
DEVICE Strip strip_at(const Params& p, Strip s, i32 index) {
  s.index = index;
  s.first_row = index * STRIP_ROWS;
  s.present = s.first_row < s.n;
  s.is_last = s.first_row + STRIP_ROWS >= s.n;
  s.last_row = s.is_last ? s.n - 1 : s.first_row + STRIP_ROWS - 1;
  // One column more than the strip's own rows have: the row above reaches the first of them by its diagonal.
  s.first_column = s.first_row - 1 > p.bandwidth ? s.first_row - 1 - p.bandwidth : 0;
  s.last_column = s.m - 1 < s.last_row + p.bandwidth ? s.m - 1 : s.last_row + p.bandwidth;
  return s;
}
// Length of a series that is padded to `padded` steps; 0 where the number given is no length.
DEVICE i32 length_of(const i64* lengths, i32 series, i32 padded) {
  if (!lengths) return padded;
  const i64 given = lengths[series];
  return given >= 1 && given <= padded ? (i32)given : 0;
}
DEVICE Strip strip_of(const Params& p, i32 pair, i32 index) {
  Strip s;
  s.pair = pair;
  s.series = series_of(p, pair);
  // A series that does not exist has no length either.
  s.n = (u32)s.series.x >= (u32)p.x_count ? 0 : length_of(p.x_lengths, s.series.x, p.n);
  s.m = (u32)s.series.y >= (u32)p.y_count ? 0 : length_of(p.y_lengths, s.series.y, p.m);
  s.bandwidth = p.bandwidth;
  i32 difference = s.n > s.m ? s.n - s.m : s.m - s.n;
  s.valid = s.n >= 1 && s.m >= 1 && difference <= p.bandwidth;
  return strip_at(p, s, index);
}
DEVICE bool in_band(const Strip& s, i32 row, i32 column) {
  i32 offset = row - column;
  return column >= 0 && column < s.m && offset <= s.bandwidth && -offset <= s.bandwidth;
}
// Step at which the strip is at the pair's last cell.
DEVICE i32 final_step(const Strip& s) { return s.m - 1 + (s.n - 1 - s.first_row); }
DEVICE i32 last_step(const Strip& s) { return s.last_column + (s.last_row - s.first_row); }

// The pair's own series.
DEVICE const element* x_of(const Params& p, const Strip& s) { return (const element*)p.x + s.series.x * p.x_stride; }
DEVICE const element* y_of(const Params& p, const Strip& s) { return (const element*)p.y + s.series.y * p.y_stride; }
