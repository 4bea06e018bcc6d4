// The argument of the kernels of second order; dual.py has the same fields in the same order.
#pragma once

struct Params {
  const void* x;           // (K, N, D), or the cost matrix (B, N, M)
  const void* y;           // (L, M, D)
  const void* a;           // (B or 1, N, F), or the matrix Omega (B or 1, N, M); null for zeros
  const void* b;           // (B or 1, M, F); null for zeros
  const i64* x_lengths;    // (K,) or null; without `pairs` (B,)
  const i64* y_lengths;    // (L,) or null; without `pairs` (B,)
  const i32* pairs;        // (B, 2) which series of x and which of y each pair has; null where pair b is series b of both
  const void* grad;        // (B,) gradient of <E, Omega>
  void* value;             // (B,)
  void* dot;               // (B,) <E, Omega>
  void* grad_x;            // (B, N, D), or (B, N, M) for a cost matrix, zeros at first; null when not wanted. The others likewise
  void* grad_y;            // (B, M, D)
  void* grad_a;            // (B, N, F), or (B, N, M)
  void* grad_b;            // (B, M, F)
  u8* states;              // saved lane states, one per checkpoint of each strip
  u8* bounds;              // saved bottom row of each strip
  u8* rows;                // one hand-off row per pair, all ones at first
  void* progress;          // (B, strips) all ones at first; how far the backward of each strip has come
  u32* tickets;            // one counter, all ones at first
  u32* other_tickets;      // a word that nobody reads
  i64 x_stride, y_stride;  // elements from one series to the next, 0 for a series that stands for all
  i64 a_stride, b_stride;
  i64 pair_bytes;          // from one pair's states (and bounds) to the next pair's
  i64 row_bytes;           // from one pair's hand-off row to the next pair's
  i64 grad_stride;         // of `grad`; 0 when one number stands for all samples
  double scale;            // log2(e) / gamma
  double unscale;          // gamma * ln(2)
  double inverse_gamma;
  i32 batch, n, m;
  i32 d, f;                // features of x and y; of a and b
  i32 x_count, y_count;    // K and L; B without `pairs`
  i32 bandwidth;           // |i - j| <= bandwidth; at least n + m when there is no band
  i32 strips;              // strips of the longest sample
  i32 checkpoints;         // checkpoints kept per strip
  i32 bound_columns;       // columns kept of each bottom row
  i32 blocks;              // of the launch
  i32 save;                // forward: keep states and bounds
  i32 start_lag;           // backward: a strip begins where the one so many before it in the walk found alignment weight
  i32 whole_units;         // features come in fours that are aligned to 16 bytes
};
