// Rows of features on their way from memory to planes in shared memory, in the registers of a group of 128 threads; 16-bit
// inputs still packed. Loads are unconditional, from the nearest row and feature there is, so that none of them has to be
// waited for; stage_rows drops what lies outside.
#pragma once

struct Quad { float v[4]; };
#define QUADS_PER_ROW (DIMS / 4)
// A group shares out rows by quads: a thread has the same quad of every ROWS_AT_A_TIME-th row. Unsigned, since a negative
// thread, were there one, would divide differently, and it shows in the registers that addresses take.
#define ROWS_AT_A_TIME (GROUP / QUADS_PER_ROW)
DEVICE i32 first_row_of(i32 thread) { return (i32)((u32)thread / QUADS_PER_ROW); }
DEVICE i32 first_feature_of(i32 thread) { return (i32)((u32)thread % QUADS_PER_ROW * 4u); }
#if INPUT == FLOAT32
typedef Word4 PackedQuad;
DEVICE Quad unpack(const PackedQuad& w) { return Quad{{float_of(w.a), float_of(w.b), float_of(w.c), float_of(w.d)}}; }
DEVICE PackedQuad gather(const element* from) {
  return PackedQuad{bits_of(from[0]), bits_of(from[1]), bits_of(from[2]), bits_of(from[3])};
}
#else
typedef Word2 PackedQuad;
DEVICE Quad unpack(const PackedQuad& w) { return Quad{{low_of(w.a), high_of(w.a), low_of(w.b), high_of(w.b)}}; }
DEVICE PackedQuad gather(const element* from) {
  return PackedQuad{(u32)from[0] | (u32)from[1] << 16, (u32)from[2] | (u32)from[3] << 16};
}
#endif
// Undoes the reading of a quad from `by` features further left; of four or more, none is inside.
DEVICE void shift_down(Quad& quad, i32 by) {
  if (by & 1) { quad.v[0] = quad.v[1]; quad.v[1] = quad.v[2]; quad.v[2] = quad.v[3]; }
  if (by & 2) { quad.v[0] = quad.v[2]; quad.v[1] = quad.v[3]; }
}
template <int ROWS> struct Rows { PackedQuad quads[ROWS * QUADS_PER_ROW / GROUP]; };
typedef Rows<32> RowBlock;
struct OwnRows { RowBlock halves[LANE_ROWS]; };  // the strip's own rows, or a slice of them

// ---- fetching
// All features of some rows.
template <int ROWS = 32> DEVICE Rows<ROWS> fetch_rows(const Features& f, i32 first_row, i32 thread) {
  Rows<ROWS> block;
  const element* base = f.rows + (i64)first_row * f.d;
  const i32 last = f.count - 1 - first_row;
  UNROLL for (int i = 0; i < ROWS * QUADS_PER_ROW / GROUP; i++) {
    const i32 row = first_row_of(thread) + i * ROWS_AT_A_TIME, k = first_feature_of(thread);
    i32 offset = (row < last ? row : last) * f.d;
    if constexpr (FIT == WHOLE_SLICES) {
      block.quads[i] = *(const PackedQuad*)(base + offset + k);
    } else {
      const element* from = base + offset + (k < f.d - 4 ? k : f.d - 4);
      block.quads[i] = FIT == WHOLE_QUADS ? *(const PackedQuad*)from : gather(from);
    }
  }
  return block;
}
DEVICE OwnRows fetch_x(const Params& p, const Strip& s, i32 thread) {
  OwnRows own;
  UNROLL for (int half = 0; half < LANE_ROWS; half++)
    own.halves[half] = fetch_rows(features_x(p, s), s.first_row + half * 32, thread);
  return own;
}
// Slices: where a thread's quads of 32 rows begin, kept from slice to slice.
struct RowPointers { const element* at[32 * QUADS_PER_ROW / GROUP]; };
DEVICE RowPointers pointers_to(const Features& f, i32 first_row, i32 thread) {
  RowPointers rows;
  UNROLL for (int i = 0; i < 32 * QUADS_PER_ROW / GROUP; i++) {
    const i32 row = first_row + first_row_of(thread) + i * ROWS_AT_A_TIME;
    rows.at[i] = f.rows + (i64)(row < f.count ? row : f.count - 1) * f.d + first_feature_of(thread);
  }
  return rows;
}
DEVICE RowBlock fetch_slice(const RowPointers& rows, i32 slice, i32 d, i32 thread) {
  RowBlock block;
  i32 offset = slice * DIMS;
  if (FIT != WHOLE_SLICES) {
    const i32 last_quad = d - 4 - first_feature_of(thread);
    if (offset > last_quad) offset = last_quad;
  }
  UNROLL for (int i = 0; i < 32 * QUADS_PER_ROW / GROUP; i++)
    block.quads[i] = FIT != ANY_ROWS ? *(const PackedQuad*)(rows.at[i] + offset) : gather(rows.at[i] + offset);
  return block;
}
struct OwnPointers { RowPointers halves[LANE_ROWS]; };
DEVICE OwnPointers pointers_to_x(const Params& p, const Strip& s, i32 thread) {
  OwnPointers rows;
  UNROLL for (int half = 0; half < LANE_ROWS; half++) rows.halves[half] = pointers_to(features_x(p, s), s.first_row + half * 32, thread);
  return rows;
}
DEVICE OwnRows fetch_x(const OwnPointers& rows, i32 slice, i32 d, i32 thread) {
  OwnRows own;
  UNROLL for (int half = 0; half < LANE_ROWS; half++) own.halves[half] = fetch_slice(rows.halves[half], slice, d, thread);
  return own;
}

// ---- staging
// What is added to a thread's four features once they are scaled, to centre them. The scale is a power of two, so that
// multiplying before centring rounds no differently. (It may overflow, for a centre 2^128 times as large as what is around
// it: then every cost is NaN, and flagged.)
DEVICE Quad shift_of(const float* centre, float scale, i32 thread) {
  Quad shift;
  UNROLL for (int j = 0; j < 4; j++) shift.v[j] = -centre[first_feature_of(thread) + j] * scale;
  return shift;
}
// Each row's sum of squares from those of its quads.
template <class T, int COUNT> DEVICE void store_row_sums(float* of_rows, T (&sum)[COUNT], float scale, i32 thread) {
  const float unscale = float_of((254u << 23) - bits_of(scale));
  UNROLL for (int mask = QUADS_PER_ROW / 2; mask > 0; mask /= 2)
    UNROLL for (int i = 0; i < COUNT; i++) sum[i] += from_lane_xor(sum[i], mask);
  if (first_feature_of(thread) == 0) {
    UNROLL for (int i = 0; i < COUNT; i++) {
      const i32 row = first_row_of(opaque(thread)) + i * ROWS_AT_A_TIME;
      of_rows[row] = (float)sum[i] * unscale * unscale;
    }
  }
}
// Who receives the sums of squares of staged rows.
struct NoSquares {
  static constexpr bool WANTED = false;
  template <int COUNT> METHOD void add(float (&)[COUNT], i32, i32, float, i32) {}
};
struct RowSquares {
  static constexpr bool WANTED = true;
  float* of_rows;
  template <int COUNT> METHOD void add(float (&sum)[COUNT], i32, i32, float scale, i32 thread) { store_row_sums(of_rows, sum, scale, thread); }
};
struct SlicedSquares {
  static constexpr bool WANTED = true;
  float* of_rows;
  double sum[32 * QUADS_PER_ROW / GROUP];  // of this thread's features of its rows, slice after slice
  template <int COUNT> METHOD void add(float (&of_slice)[COUNT], i32 slice, i32 d, float scale, i32 thread) {
    UNROLL for (int i = 0; i < COUNT; i++) sum[i] = (slice > 0 ? sum[i] : 0.0) + (double)of_slice[i];
    if ((slice + 1) * DIMS < d) return;
    store_row_sums(of_rows, sum, scale, thread);
  }
};
// Centres and scales the rows and stores them as planes; `squares` receives each row's sum of squares, once the last slice
// is in. Rows past the end repeat the last one, as they were fetched: no path goes through them. Returns whether a plane
// may overflow, if there is a band and squares are wanted: rows that are in a tile but beside the band have no cost to tell
// by, and nothing times infinity would spoil the gradients.
template <int ROWS, class Squares>
DEVICE bool stage_rows(PlaneRow* planes, i32 plane_rows, const Rows<ROWS>& block, i32 d, const Quad& shift, float scale, Squares& squares,
                       i32 slice, i32 thread) {
  constexpr int QUADS_PER_THREAD = ROWS * QUADS_PER_ROW / GROUP;
  float sum[QUADS_PER_THREAD];
  const i32 k = first_feature_of(thread);
  bool overflows = false;
  const i32 past = k - (d - 4 - slice * DIMS), moved = past > 0 ? past : 0;  // how much further left fetch_rows read
  UNROLL for (int i = 0; i < QUADS_PER_THREAD; i++) {
    const i32 row = first_row_of(thread) + i * ROWS_AT_A_TIME;
    Quad quad = unpack(block.quads[i]);
    if constexpr (FIT == ANY_ROWS) shift_down(quad, moved);
    sum[i] = 0.0f;
    UNROLL for (int j = 0; j < 4; j++) {
      quad.v[j] = multiply_add(quad.v[j], scale, shift.v[j]);
      if (FIT != WHOLE_SLICES && slice * DIMS + (FIT == WHOLE_QUADS ? k : k + j) >= d) quad.v[j] = 0.0f;
      sum[i] += quad.v[j] * quad.v[j];
    }
    if (BANDED && Squares::WANTED) overflows |= sum[i] > LARGEST_IN_PLANE * LARGEST_IN_PLANE;
    if constexpr (SLICED && INPUT != FLOAT32 && FIT == WHOLE_SLICES) {  // neither centred nor scaled
      *(PackedQuad*)&planes[row][k] = block.quads[i];
    } else {
      u32 low[PLANES], high[PLANES];
      split(low, quad.v[0], quad.v[1]);
      split(high, quad.v[2], quad.v[3]);
      UNROLL for (int plane = 0; plane < PLANES; plane++)
        *(Word2*)&planes[plane * plane_rows + row][k] = Word2{low[plane], high[plane]};
    }
  }
  squares.add(sum, slice, d, scale, thread);
  return overflows;
}
template <int ROWS>
DEVICE void stage_rows(PlaneRow* planes, i32 plane_rows, const Rows<ROWS>& block, i32 d, const Quad& shift, float scale, i32 slice, i32 thread) {
  NoSquares none;
  stage_rows(planes, plane_rows, block, d, shift, scale, none, slice, thread);
}
DEVICE void stage_x(PlaneRow* planes, const OwnRows& own, i32 d, const Quad& shift, float scale, i32 slice, i32 thread) {
  UNROLL for (int half = 0; half < LANE_ROWS; half++) stage_rows(planes + half * 32, STRIP_ROWS, own.halves[half], d, shift, scale, slice, thread);
}
