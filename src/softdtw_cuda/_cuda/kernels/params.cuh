// The argument of every kernel; params.py has the same fields in the same order.
#pragma once

struct Params {
  const void* x;            // (K, N, D), or the cost matrix (B, N, M)
  const void* y;            // (L, M, D)
  const i64* x_lengths;     // (K,) or null; without `pairs` (B,)
  const i64* y_lengths;     // (L,) or null; without `pairs` (B,)
  const i32* pairs;         // (B, 2) which series of x and which of y each pair has; null where pair b is series b of both
  const void* grad;         // (B,) gradient of the value; null for 1, and then a rerun finds the value too
  void* value;              // (B,)
  void* grad_x;             // (B, N, D), or (B, N, M) for a cost matrix; null when not wanted
  void* grad_y;             // (B, M, D); null when not wanted
  void* sum_x;              // where grad_x and grad_y are summed: themselves, or float32 scratch for 16-bit gradients; what
                            // scale.cu multiplies
  void* sum_y;
  u8* states;               // saved lane states, one per checkpoint of each strip
  u8* bounds;               // saved bottom row of each strip
  u8* scratch;              // the words below that are all ones at first; null when no later launch needs them
  u8* rows;                 // one hand-off row per pair, all ones at first, and two words for each of its strips
  u8* more_rows;            // one more for the second half of wide words
  u32* tickets;             // one counter, all ones at first; null for reruns where block b has pair b, of one strip
  u32* other_tickets;       // the counter of the launch that follows, or came before
  u32* range_flags;         // (B + 1,) all ones; a narrow kernel clears bit 0 of a pair that is beyond its range, and of [B],
                            // which nobody reads where there are no tickets
  u32* progress;            // (B, 4) all ones; how far the reruns of a pair have come
  u32* grad_y_order;        // (B, column tiles) all ones; the last strip, in the order of the walk, to add to this part of grad_y
  i64 x_stride, y_stride;   // elements from one series to the next, 0 for a series that stands for all
  i64 pair_bytes;           // from one pair's states (and bounds) to the next pair's
  i64 row_bytes;            // from one pair's hand-off row to the next pair's; 0 where no pair has several strips
  i64 more_row_bytes;
  i64 scratch_bytes;        // a multiple of 16
  i64 grad_stride;          // of `grad`; 0 when one number stands for all samples
  double scale;             // log2(e) / gamma
  double unscale;           // gamma * ln(2)
  i32 batch, n, m, d;
  i32 x_count, y_count;     // K and L; B without `pairs`
  i32 bandwidth;            // |i - j| <= bandwidth; at least n + m when there is no band
  i32 strips;               // strips of the longest sample
  i32 checkpoints;          // checkpoints kept per strip
  i32 bound_columns;        // columns kept of each bottom row
  i32 tiles;                // column tiles of 32
  i32 start_lag;            // backward: a strip begins where the one before it in the walk sent alignment weight (1), or
                            // where the one so many before it found some; the first so many begin at their last column
  i32 rerun;                // 1: walk only the flagged pairs, however few blocks there are
  i32 blocks;               // of the launch
  i32 save;                 // forward: keep states and bounds
  i32 grad_x_wide;          // 16-bit input whose gradient is wanted in float32 (a broadcast side)
  i32 grad_y_wide;
  i64 saved_bytes;          // of a pair's part, what the main kernel saves; the rest a rerun may need
};

// A pair that is beyond the range of narrow arithmetic is flagged; the launch that follows computes it with wide numbers.
DEVICE void flag_out_of_range(const Params& p, i32 pair) {
  clear_bits(&p.range_flags[pair], 1u);
  clear_bits(&p.range_flags[p.batch], 1u);
}
DEVICE bool is_in_range(const Params& p, i32 pair) { return p.range_flags[pair] & 1u; }
DEVICE bool all_in_range(const Params& p) { return p.range_flags[p.batch] & 1u; }
