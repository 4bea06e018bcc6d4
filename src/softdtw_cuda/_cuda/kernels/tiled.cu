// Soft-DTW with costs made tile by tile by helper warps while one warp walks: tensor cores for wide features, direct
// differences for narrow ones, or a given cost matrix. Narrow arithmetic only; inline.cu covers the rest and explains
// the walk itself.
//
//   (5, 6)  Z_ij = w_ij (Z_{i-1,j-1} + Z_{i-1,j} + Z_{i,j-1}),   Z_00 = 1
//   (8)     E_ij = E_{i+1,j} p_up(i+1,j) + E_{i,j+1} p_left(i,j+1) + E_{i+1,j+1} p_diag(i+1,j+1),   E_NM = 1
//   gX_i = 2 g sum_j E_ij (x_i - y_j)      gY_j = -2 g sum_i E_ij (x_i - y_j)
//
// One block has one strip (STRIP_ROWS rows) of one pair. Time goes in slots of 32 steps, a *chunk* of the walk, with one
// block barrier between slots. A *tile* is STRIP_ROWS rows by 32 columns; the tile of columns 32 q and on has its cells
// in chunks q to q + LANE_ROWS. Costs and alignments are kept by [step][row], as the walk reads and writes them: rings
// of chunks, in which a tile is a parallelogram.
//
//   forward    slot of chunk c:  warp 0 walks c;  warps 1-4 make the costs of tile c + 1
//   backward   recompute walks checkpoint K forwards, chunk by chunk, leaving the shares (7) in shared memory;
//              sweep follows CHECKPOINT / 32 slots later, chunks in reverse, leaving E in its ring;
//              four warps make the costs of tiles further left; four turn E of the tile just completed into gX and
//              four into gY; one warp, the porter, takes turns with the strips above and below at adding to gY.
//
// gX of a strip is its own. gY is summed by all strips of a pair, from the bottom up, each tile of columns passed from
// strip to strip by a release / acquire flag: a fixed order, so results are bitwise reproducible.
//
//   MODE 0  cost matrix      MODE 1  direct differences, D <= DIMS      MODE 3  tensor cores, DIMS features at a time
//   SLICED  1 when D > DIMS
//   FIT     how rows are read: 2 when D is a multiple of DIMS, 1 when it is one of four, both with aligned rows; else 0
#include "primitives.cuh"
#include "recurrence.cuh"
#include "walker.cuh"

#define CHUNKS_PER_CHECKPOINT (CHECKPOINT / 32)
#define COST_CHUNKS (LANE_ROWS + 2 * CHUNKS_PER_CHECKPOINT)     // chunks in the backward's ring of costs
#define FORWARD_CHUNKS (LANE_ROWS + 2)
#define ALIGN_CHUNKS (LANE_ROWS + 2)
#define SHARE_SLOTS (CHUNKS_PER_CHECKPOINT + 1)
#if MODE == 3
#define STEP_STRIDE (STRIP_ROWS + 4)  // conflict-free for the fragments of a matrix product
#else
#define STEP_STRIDE (STRIP_ROWS + 2)
#endif
#define GROUP 128  // threads of a helper group
#define COST_BARRIER 1
#define GRAD_BARRIER 2
#define FORWARD_COST_BARRIER 3  // where both passes are in one launch, with other warps for this in each

static_assert(LANE_ROWS == 1 || CHECKPOINT > 32, "the ring of costs would be too short");

typedef float Step[STEP_STRIDE];

// Position of (chunk, step within it) in a ring of `chunks` chunks.
DEVICE i32 ring_start(i32 chunk, i32 chunks) { return (chunk % chunks) * 32; }
// A tile's cells run over the ring's end at most once.
DEVICE i32 ring_step(i32 start, i32 offset, i32 chunks) {
  i32 at = start + offset;
  if ((chunks & (chunks - 1)) == 0) return at & (chunks * 32 - 1);
  return at >= chunks * 32 ? at - chunks * 32 : at;
}

DEVICE bool touches(const Strip& s, i32 tile) { return tile >= s.first_column / 32 && tile <= s.last_column / 32; }
DEVICE i32 first_tile(const Strip& s) { return s.first_column / 32; }
DEVICE i32 last_tile(const Strip& s) { return s.last_column / 32; }
DEVICE i32 first_chunk(const Strip& s) { return s.first_column / CHECKPOINT * CHUNKS_PER_CHECKPOINT; }

// ---- features: x and y of a tile
#if MODE == 3
// Features go to the tensor cores as 16-bit planes. float32: v = hi + lo / 2048 in two fp16 planes, 22 bits, after
// scaling by a power of two; what the product of two low planes would add is below that. 16-bit inputs are one plane.
#if INPUT == 0
#define PLANES 2
#else
#define PLANES 1
#endif
#define ALIGN_PLANES 2  // of E, in the format of the features
#define ROW_HALVES (DIMS + 8)  // 16-bit words from row to row: keeps ldmatrix free of conflicts
#define K_STEPS (DIMS / 16)
#define BUFFERS (SLICED ? 2 : 1)  // of slices: one is filled while another is read, with one barrier a slice
typedef u16 PlaneRow[ROW_HALVES];

#if INPUT == 3
#define mma_input mma_bf16
#define pack_input pack_bf16
#define LARGEST_IN_PLANE 1.8e19f  // and more, but no float would be left for its square
#define LOW_PLANE 1.0f          // weight of the second plane
#define LOW_PLANE_INVERSE 1.0f
DEVICE float low_of(u32 pair) { return float_of(pair << 16); }
DEVICE float high_of(u32 pair) { return float_of(pair & 0xffff0000u); }
#else
#define mma_input mma_f16
#define pack_input pack_f16
#define LARGEST_IN_PLANE 65504.0f
#define LOW_PLANE 0.00048828125f
#define LOW_PLANE_INVERSE 2048.0f
DEVICE float low_of(u32 pair) { return half_to_float((u16)(pair & 0xffffu)); }
DEVICE float high_of(u32 pair) { return half_to_float((u16)(pair >> 16)); }
#endif
// Two neighbouring values as planes; what is left after the first is exact.
template <int COUNT> DEVICE void split(u32 (&planes)[COUNT], float a, float b) {
  planes[0] = pack_input(a, b);
  if constexpr (COUNT > 1)
    planes[1] = pack_input((a - low_of(planes[0])) * LOW_PLANE_INVERSE, (b - high_of(planes[0])) * LOW_PLANE_INVERSE);
}
#endif

#if MODE != 0
struct Features {
  const element* rows;
  i32 count;            // valid rows
  i32 d;
};
DEVICE Features features_x(const Params& p, const Strip& s) {
  return Features{(const element*)p.x + s.pair * p.x_stride, s.n, p.d};
}
DEVICE Features features_y(const Params& p, const Strip& s) {
  return Features{(const element*)p.y + s.pair * p.y_stride, s.m, p.d};
}
// Rows past the end repeat the last one: their costs must stay in range, though no path goes through them.
DEVICE float feature(const Features& f, i32 row, i32 k) {
  return k < f.d ? to_float(f.rows[(i64)(row < f.count ? row : f.count - 1) * f.d + k]) : 0.0f;
}
#endif

// ---- the frame of a strip: a centre to subtract and a power of two to multiply by
// Subtracting a common centre does not change distances, and an offset of the data then costs no digits. Scaling keeps
// fp16 planes in range: the strip's own x, and a sample of y, end up at most 2, which leaves y a factor of 2^15.
#define MOST_CENTRES 1024
struct Frame {
#if MODE == 3
#if SLICED
  alignas(16) float centre[MOST_CENTRES];       // of as many features as there is room for
#else
  alignas(16) PlaneRow x[PLANES * STRIP_ROWS];  // the strip's rows for the tensor cores
  float centre[DIMS];
#endif
  float x_squares[STRIP_ROWS];
  u32 largest;
  alignas(16) Features y;  // of the pair: nobody needs a register for where it is
#else
  float nothing;
#endif
};

#if MODE == 3
// float32: the mean of eight of the strip's rows. 16 bits: zero, except (if the features come in one slice) where the data
// sits far from zero, when the difference of two inputs is representable in 16 bits again.
DEVICE float centre_of(const Features& x, const Features& y, const Strip& s, i32 k) {
#if SLICED && INPUT != 0
  return 0.0f;
#else
  float v[8], sum = 0.0f;
  UNROLL for (int i = 0; i < 8; i++) {
    i32 row = s.first_row + i * (STRIP_ROWS / 8);
    v[i] = feature(x, row <= s.last_row ? row : s.last_row, k);
  }
  UNROLL for (int i = 0; i < 8; i++) sum += v[i];
  float mean = sum * 0.125f;
  bool finite = mean - mean == 0.0f;
#if INPUT == 0
  return finite ? mean : 0.0f;
#else
  float low = v[0], high = v[0];
  UNROLL for (int i = 1; i < 8; i++) {
    low = min_of(low, v[i]);
    high = max_of(high, v[i]);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    float w = feature(y, (i32)((u32)i * (u32)(s.m - 1) / 7u), k);
    low = min_of(low, w);
    high = max_of(high, w);
  }
  float size = mean < 0.0f ? -mean : mean;
  return finite && size > 8.0f * (high - low) ? low_of(pack_input(mean, mean)) : 0.0f;
#endif
#endif
}
#if SLICED
DEVICE float centre_at(const Frame& frame, const Features& x, const Features& y, const Strip& s, i32 k) {
  return k < MOST_CENTRES ? frame.centre[k] : centre_of(x, y, s, k);
}
// Whether a slice's centres are in the frame; those of later slices are computed anew for each tile.
DEVICE bool has_centres(i32 slice) { return (slice + 1) * DIMS <= MOST_CENTRES; }
#endif
DEVICE float frame_scale(const Frame& frame) {
  u32 exponent = frame.largest >> 23;
  bool usable = INPUT == 0 && exponent > 8 && exponent < 250;
  return usable ? float_of((254u - exponent) << 23) : 1.0f;
}
DEVICE float frame_unscale(const Frame& frame) {
  u32 exponent = frame.largest >> 23;
  bool usable = INPUT == 0 && exponent > 8 && exponent < 250;
  return usable ? float_of(exponent << 23) : 1.0f;
}
#endif

#if MODE == 3
// ---- 32 rows on their way from memory to shared memory, in the registers of a group; 16-bit inputs still packed
// Loads are unconditional, from the nearest row and feature there is, so that none of them has to be waited for;
// stage_rows drops what lies outside.
struct Quad { float v[4]; };
#define QUADS_PER_ROW (DIMS / 4)
// A group shares out rows by quads: a thread has the same quad of every ROWS_AT_A_TIME-th row. Unsigned, since a negative
// thread, were there one, would divide differently, and it shows in the registers that addresses take.
#define ROWS_AT_A_TIME (GROUP / QUADS_PER_ROW)
DEVICE i32 first_row_of(i32 thread) { return (i32)((u32)thread / QUADS_PER_ROW); }
DEVICE i32 first_feature_of(i32 thread) { return (i32)((u32)thread % QUADS_PER_ROW * 4u); }
#if INPUT == 0
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
#if FIT == 0
// Undoes the reading of a quad from `by` features further left; of four or more, none is inside.
DEVICE void shift_down(Quad& quad, i32 by) {
  if (by & 1) { quad.v[0] = quad.v[1]; quad.v[1] = quad.v[2]; quad.v[2] = quad.v[3]; }
  if (by & 2) { quad.v[0] = quad.v[2]; quad.v[1] = quad.v[3]; }
}
#endif
template <int ROWS> struct Rows { PackedQuad quads[ROWS * QUADS_PER_ROW / GROUP]; };
typedef Rows<32> RowBlock;
#if !SLICED
template <int ROWS = 32> DEVICE Rows<ROWS> fetch_rows(const Features& f, i32 first_row, i32 thread) {
  Rows<ROWS> block;
  const element* base = f.rows + (i64)first_row * f.d;
  const i32 last = f.count - 1 - first_row;
  UNROLL for (int i = 0; i < ROWS * QUADS_PER_ROW / GROUP; i++) {
    const i32 row = first_row_of(thread) + i * ROWS_AT_A_TIME, k = first_feature_of(thread);
    i32 offset = (row < last ? row : last) * f.d;
#if FIT == 2
    block.quads[i] = *(const PackedQuad*)(base + offset + k);
#else
    const element* from = base + offset + (k < f.d - 4 ? k : f.d - 4);
    block.quads[i] = FIT == 1 ? *(const PackedQuad*)from : gather(from);
#endif
  }
  return block;
}
#else
// Where a thread's quads of 32 rows begin, kept from slice to slice.
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
  if (FIT != 2) {
    const i32 last_quad = d - 4 - first_feature_of(thread);
    if (offset > last_quad) offset = last_quad;
  }
  UNROLL for (int i = 0; i < 32 * QUADS_PER_ROW / GROUP; i++)
    block.quads[i] = FIT ? *(const PackedQuad*)(rows.at[i] + offset) : gather(rows.at[i] + offset);
  return block;
}
#endif

// What is added to a thread's four features once they are scaled, to centre them. The scale is a power of two, so that
// multiplying before centring rounds no differently. (It may overflow, for a centre 2^128 times as large as what is around
// it: then every cost is NaN, and flagged.)
DEVICE Quad shift_of(const float* centre, float scale, i32 thread) {
  Quad shift;
  UNROLL for (int j = 0; j < 4; j++) shift.v[j] = -centre[first_feature_of(thread) + j] * scale;
  return shift;
}
struct Squares {
  float* of_rows;
#if SLICED
  double sum[32 * QUADS_PER_ROW / GROUP];  // of this thread's features of its rows, slice after slice
#endif
};
// Centres and scales the rows and stores them as planes; `squares`, if any, receives each row's sum of squares, once the
// last slice is in. Rows past the end repeat the last one, as they were fetched: no path goes through them. Returns whether
// a plane may overflow, if there is a band and `squares` are asked for: rows that are in a tile but beside the band have no
// cost to tell by, and nothing times infinity would spoil the gradients.
template <int ROWS>
DEVICE bool stage_rows(PlaneRow* planes, i32 plane_rows, const Rows<ROWS>& block, i32 d, const Quad& shift, float scale, Squares* squares,
                       i32 slice, i32 thread) {
  constexpr int QUADS_PER_THREAD = ROWS * QUADS_PER_ROW / GROUP;
  float sum[QUADS_PER_THREAD];
  const i32 k = first_feature_of(thread);
  bool overflows = false;
#if FIT == 0
  const i32 past = k - (d - 4 - slice * DIMS), moved = past > 0 ? past : 0;  // how much further left fetch_rows read
#endif
  UNROLL for (int i = 0; i < QUADS_PER_THREAD; i++) {
    const i32 row = first_row_of(thread) + i * ROWS_AT_A_TIME;
    Quad quad = unpack(block.quads[i]);
#if FIT == 0
    shift_down(quad, moved);
#endif
    sum[i] = 0.0f;
    UNROLL for (int j = 0; j < 4; j++) {
      quad.v[j] = multiply_add(quad.v[j], scale, shift.v[j]);
      if (FIT != 2 && slice * DIMS + (FIT == 1 ? k : k + j) >= d) quad.v[j] = 0.0f;
      sum[i] += quad.v[j] * quad.v[j];
    }
    if (BANDED && squares) overflows |= sum[i] > LARGEST_IN_PLANE * LARGEST_IN_PLANE;
#if SLICED && INPUT != 0 && FIT == 2  // neither centred nor scaled
    *(PackedQuad*)&planes[row][k] = block.quads[i];
#else
    u32 low[PLANES], high[PLANES];
    split(low, quad.v[0], quad.v[1]);
    split(high, quad.v[2], quad.v[3]);
    UNROLL for (int plane = 0; plane < PLANES; plane++)
      *(Word2*)&planes[plane * plane_rows + row][k] = Word2{low[plane], high[plane]};
#endif
  }
  if (squares) {
#if SLICED
    UNROLL for (int i = 0; i < QUADS_PER_THREAD; i++) squares->sum[i] = (slice > 0 ? squares->sum[i] : 0.0) + (double)sum[i];
    if ((slice + 1) * DIMS < d) return overflows;
    double (&sum)[QUADS_PER_THREAD] = squares->sum;
#endif
    const float unscale = float_of((254u << 23) - bits_of(scale));
    UNROLL for (int mask = QUADS_PER_ROW / 2; mask > 0; mask /= 2)
      UNROLL for (int i = 0; i < QUADS_PER_THREAD; i++) sum[i] += from_lane_xor(sum[i], mask);
    if (k == 0) {
      UNROLL for (int i = 0; i < QUADS_PER_THREAD; i++) {
        const i32 row = first_row_of(afresh(thread)) + i * ROWS_AT_A_TIME;
        squares->of_rows[row] = (float)sum[i] * unscale * unscale;
      }
    }
  }
  return overflows;
}
#endif

#if MODE == 3
// The strip's own rows, or a slice of them, likewise.
struct OwnRows { RowBlock halves[LANE_ROWS]; };
#if SLICED
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
#else
DEVICE OwnRows fetch_x(const Params& p, const Strip& s, i32 thread) {
  OwnRows own;
  UNROLL for (int half = 0; half < LANE_ROWS; half++)
    own.halves[half] = fetch_rows(features_x(p, s), s.first_row + half * 32, thread);
  return own;
}
#endif
DEVICE void stage_x(PlaneRow* planes, const OwnRows& own, i32 d, const Quad& shift, float scale, i32 slice, i32 thread) {
  UNROLL for (int half = 0; half < LANE_ROWS; half++)
    stage_rows(planes + half * 32, STRIP_ROWS, own.halves[half], d, shift, scale, nullptr, slice, thread);
}
#endif

#if MODE == 3
#define ROWS_MEASURED (STRIP_ROWS + 8)  // the strip's own, then eight of y from the whole of it
// Row r of those: where it is, and whether it is there.
struct MeasuredRow { const element* at; bool there; };
DEVICE MeasuredRow measured_row(const Features& x, const Features& y, const Strip& s, i32 r) {
  const u32 sample = (u32)(r < ROWS_MEASURED ? r - STRIP_ROWS : 7);
  const i32 row = r < STRIP_ROWS ? s.first_row + r : (i32)(sample * (u32)(s.m - 1) / 7u);
  // Past the last of them it is y's last row, which is measured already and changes nothing.
  if (r >= STRIP_ROWS) return MeasuredRow{y.rows + (i64)row * y.d, true};
  return MeasuredRow{x.rows + (i64)(row < x.count ? row : x.count - 1) * x.d, row < x.count};
}
DEVICE float size_of(float v) { return v < 0.0f ? -v : v; }
// One warp's part of row r: its lanes' sums of squares and largest values, put together.
DEVICE void measure_row(Frame& frame, i32 r, double sum, float largest) {
  UNROLL for (int mask = 16; mask > 0; mask /= 2) {
    sum += from_lane_xor(sum, mask);
    largest = max_of(largest, from_lane_xor(largest, mask));
  }
  if (lane_index() == 0) {
    if (r < STRIP_ROWS) frame.x_squares[r] = (float)sum;
    raise_to(&frame.largest, bits_of(largest));
  }
}
#endif

// By all THREADS threads of a block.
template <int THREADS> DEVICE void make_frame(Frame& frame, const Params& p, const Strip& s) {
#if MODE == 3
  const i32 lane = (i32)lane_index(), warp = (i32)warp_index(), thread = (i32)thread_index();
  constexpr int WARPS = THREADS / 32;
  const Features x = features_x(p, s), y = features_y(p, s);
  if (thread == 0) { frame.largest = 0u; frame.y = y; }
#if SLICED
  for (i32 k = thread; k < MOST_CENTRES; k += THREADS) frame.centre[k] = centre_of(x, y, s, k);
  block_barrier();
  for (i32 r = warp; r < ROWS_MEASURED; r += WARPS) {
    const MeasuredRow row = measured_row(x, y, s, r);
    double sum = 0.0;
    float largest = 0.0f;
    auto measure = [&](float v, float centre) {
      v -= centre;
      largest = max_of(largest, size_of(v));
      sum += (double)v * (double)v;
    };
    if (row.there) {
      i32 k = FIT ? lane * 4 : lane;
      UNROLL_BY(4) for (; k < p.d && k < MOST_CENTRES; k += FIT ? 128 : 32) {
#if FIT
        const Quad quad = unpack(*(const PackedQuad*)(row.at + k));
        UNROLL for (int j = 0; j < 4; j++) measure(quad.v[j], frame.centre[k + j]);
#else
        measure(to_float(row.at[k]), frame.centre[k]);
#endif
      }
      UNROLL_BY(1) for (k = MOST_CENTRES + lane; k < p.d; k += 32) measure(to_float(row.at[k]), centre_of(x, y, s, k));
    }
    measure_row(frame, r, sum, largest);
  }
  block_barrier();
#else
  // Nothing else runs on the multiprocessor meanwhile, so as much is asked for before anything is waited for as there
  // are registers for.
  constexpr int ROUNDS = (ROWS_MEASURED + WARPS - 1) / WARPS, PER_LANE = DIMS / 32;
  constexpr int AT_ONCE = DIMS <= 64 || ROUNDS <= 5 ? ROUNDS : 5;
#if DIMS <= 64
  OwnRows own;
  if (thread < GROUP) own = fetch_x(p, s, thread);
#endif
  for (i32 k = thread; k < DIMS; k += THREADS) frame.centre[k] = centre_of(x, y, s, k);
  UNROLL_BY(1) for (int round = 0; round < ROUNDS; round += AT_ONCE) {
    element v[AT_ONCE][PER_LANE];
    UNROLL for (int i = 0; i < AT_ONCE; i++) {
      const MeasuredRow row = measured_row(x, y, s, warp + (round + i) * WARPS);
      UNROLL for (int j = 0; j < PER_LANE; j++) v[i][j] = row.at[lane + j * 32 < p.d ? lane + j * 32 : p.d - 1];
    }
    if (round == 0) block_barrier();
    UNROLL for (int i = 0; i < AT_ONCE; i++) {
      const i32 r = warp + (round + i) * WARPS;
      const bool there = measured_row(x, y, s, r).there;
      double sum = 0.0;
      float largest = 0.0f;
      UNROLL for (int j = 0; j < PER_LANE; j++) {
        float away = there && lane + j * 32 < p.d ? to_float(v[i][j]) - frame.centre[lane + j * 32] : 0.0f;
        largest = max_of(largest, size_of(away));
        sum += (double)away * (double)away;
      }
      measure_row(frame, r, sum, largest);
    }
  }
  block_barrier();
  if (thread < GROUP) {
#if DIMS > 64
    const OwnRows own = fetch_x(p, s, thread);
#endif
    const float scale = frame_scale(frame);
    stage_x(frame.x, own, p.d, shift_of(frame.centre, scale, thread), scale, 0, thread);
  }
  block_barrier();
#endif
#endif
}

// Clears `count` floats of shared memory, a multiple of four, to `value`; by all THREADS threads of a block.
template <int THREADS> DEVICE void fill_ring(float* ring, i32 count, float value) {
  const u32 bits = bits_of(value);
  for (i32 i = (i32)thread_index(); i < count / 4; i += THREADS) ((Word4*)ring)[i] = Word4{bits, bits, bits, bits};
}

#if MODE == 1
// y of a tile on its way to shared memory.
#define DIRECT_PER_THREAD ((32 * DIMS + GROUP - 1) / GROUP)
struct DirectRows { element v[DIRECT_PER_THREAD]; };
DEVICE DirectRows fetch_direct(const Features& f, i32 tile, i32 thread) {
  DirectRows block;
  UNROLL for (int i = 0; i < DIRECT_PER_THREAD; i++) {
    i32 index = thread + i * GROUP, row = tile * 32 + index / DIMS, k = index % DIMS;
    block.v[i] = f.rows[(i64)(row < f.count ? row : f.count - 1) * f.d + (k < f.d ? k : f.d - 1)];
  }
  return block;
}
DEVICE void stage_direct(float (*rows)[DIMS], const DirectRows& block, const Features& f, i32 thread) {
  UNROLL for (int i = 0; i < DIRECT_PER_THREAD; i++) {
    i32 index = thread + i * GROUP, k = index % DIMS;
    rows[index / DIMS][k] = k < f.d ? to_float(block.v[i]) : 0.0f;
  }
}
#endif
#if MODE == 0
// A tile of the cost matrix: each thread one column of every fourth row, read from the nearest cell there is.
DEVICE void fetch_costs(element (&next)[STRIP_ROWS / 4], const Params& p, const Strip& s, i32 tile, i32 thread) {
  const element* cost = (const element*)p.x + s.pair * p.x_stride;
  const i32 column = tile * 32 + (thread & 31);
  const element* at = cost + (column < s.m ? column : s.m - 1);
  UNROLL for (int i = 0; i < STRIP_ROWS / 4; i++) {
    i32 row = s.first_row + (thread >> 5) + i * 4;
    next[i] = at[(i64)(row < s.n ? row : s.n - 1) * p.m];
  }
}
#endif

// ---- making the costs of a tile
struct CostShared {
#if MODE == 3
  alignas(16) PlaneRow y[BUFFERS][PLANES * 32];
  float y_squares[32];
#if SLICED
  alignas(16) PlaneRow x[BUFFERS][PLANES * STRIP_ROWS];
  float centre[DIMS];
#endif
#elif MODE == 1
  float y[32][DIMS];
#else
  float nothing;
#endif
};

#if MODE == 3
#define ROW_TILES (STRIP_ROWS / 16)
#define WARPS_PER_ROW_TILE (4 / ROW_TILES)
#define COLUMN_TILES (4 / WARPS_PER_ROW_TILE)  // 8 columns each, per warp
#define KEEP_X (DIMS <= 64 && !SLICED)          // in registers; other features are read as they are needed
#define LOOKS_AHEAD (SLICED || DIMS * PLANES <= 64)  // gX has registers for y of the next tile or slice
#endif
// Whether helpers compute their addresses anew for every tile, instead of keeping them in registers that then spill. It
// takes instructions, so it is done only where the compiler says it must be. Sliced costs are quicker by it.
#define COSTS_ANEW (MODE == 3 && (SLICED || (INPUT == 0 && (DIMS > 64 || (DIMS == 64 && BANDED && FIT < 2)))))
#define FORWARD_COSTS_ANEW (MODE == 3 && DIMS == 64 && BANDED && !SPILLS_EASILY)
#define GRAD_X_ANEW (MODE == 3 && DIMS > 64 && SPILLS_EASILY)
#define PLANE_BY_PLANE (GRAD_X_ANEW && INPUT == 0)

// What a cost-making thread keeps for its strip.
struct CostMaker {
#if MODE == 3
#if KEEP_X
  u32 x[K_STEPS][PLANES][4];  // the warp's 16 rows as fragments of A
#endif
  RowBlock next;              // y of the next tile or slice
#if SLICED
  RowPointers next_rows;      // where that is
  OwnRows own;                // and x of the next slice
  OwnPointers own_rows;
#endif
#elif MODE == 1
  float x[LANE_ROWS][DIMS];   // rows lane, lane + 32
  DirectRows next;
#else
  element next[STRIP_ROWS / 4];  // costs of the next tile: rows warp, warp + 4, ...
#endif
  u32 barrier;  // of the group
  bool bad;
};

#if MODE == 3
#if SLICED
DEVICE void set_centre(float* centre, const Params& p, const Strip& s, i32 slice, i32 thread) {
  Features x = features_x(p, s);
  for (i32 k = thread; k < DIMS; k += GROUP) centre[k] = centre_of(x, features_y(p, s), s, slice * DIMS + k);
}
#endif
#endif

#if MODE == 3
// Lane l points ldmatrix at row l % 8 of matrix l / 8: rows 0-7 and 8-15, features 0-7 and 8-15.
DEVICE void load_x_fragment(u32 (&a)[PLANES][4], const PlaneRow* x, i32 k_step, i32 thread) {
  const i32 lane = thread & 31, matrix = lane >> 3, first = (i32)(((u32)thread >> 5) % ROW_TILES) * 16;
  UNROLL for (int plane = 0; plane < PLANES; plane++)
    load_matrices(a[plane], &x[plane * STRIP_ROWS + first + (matrix & 1) * 8 + (lane & 7)][k_step * 16 + (matrix >> 1) * 8]);
}
#if KEEP_X
DEVICE void load_x_fragments(CostMaker& maker, const PlaneRow* x, i32 thread) {
  UNROLL for (int k_step = 0; k_step < K_STEPS; k_step++) load_x_fragment(maker.x[k_step], x, k_step, thread);
}
#endif
#endif

DEVICE CostMaker open_costs(const Params& p, const Strip& s, const Frame& frame, u32 barrier, i32 first, i32 thread) {
  CostMaker maker;
  maker.barrier = barrier;
  maker.bad = false;
#if MODE == 3
#if KEEP_X
  load_x_fragments(maker, frame.x, thread);
#endif
#if SLICED
  maker.own_rows = pointers_to_x(p, s, thread);
  maker.own = fetch_x(maker.own_rows, 0, p.d, thread);
  maker.next_rows = pointers_to(frame.y, first * 32, thread);
  maker.next = fetch_slice(maker.next_rows, 0, p.d, thread);
#else
  maker.next = fetch_rows(frame.y, first * 32, thread);
#endif
#elif MODE == 1
  Features x = features_x(p, s);
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    UNROLL for (int k = 0; k < DIMS; k++) maker.x[q][k] = feature(x, s.first_row + (thread & 31) + q * 32, k);
  maker.next = fetch_direct(features_y(p, s), first, thread);
#else
  fetch_costs(maker.next, p, s, first, thread);
#endif
  return maker;
}

#if MODE == 3
// c += A B and cross += A_lo B_hi + A_hi B_lo for neighbouring 8-column tiles of B. Neighbouring products belong to
// different accumulators, so none waits for the one before.
template <int TILES, int A_PLANES>
DEVICE void multiply(float (&c)[TILES][4], float (&cross)[TILES][4], const u32 (&a)[A_PLANES][4], const u32 (&b)[PLANES][(TILES + 1) / 2][4]) {
  UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[0], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
  if constexpr (A_PLANES > 1) {
    UNROLL for (int i = 0; i < TILES; i++) mma_input(cross[i], a[1], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
  }
  if constexpr (PLANES > 1) {
    UNROLL for (int i = 0; i < TILES; i++) mma_input(cross[i], a[0], b[1][i / 2][(i & 1) * 2], b[1][i / 2][(i & 1) * 2 + 1]);
  }
}
// The same product in one set of registers, where two would be too many: the small terms first, so that c, which starts
// as zeros, is scaled once.
template <int TILES>
DEVICE void multiply_in_place(float (&c)[TILES][4], const u32 (&a)[2][4], const u32 (&b)[PLANES][(TILES + 1) / 2][4]) {
  UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[1], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
  if constexpr (PLANES > 1) {
    UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[0], b[1][i / 2][(i & 1) * 2], b[1][i / 2][(i & 1) * 2 + 1]);
  }
  UNROLL for (int i = 0; i < TILES; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] *= LOW_PLANE;
  UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[0], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
}
#endif

// Writes one scaled cost into the ring and watches its range.
DEVICE void put_cost(Step* ring, i32 start, i32 chunks, const Strip& s, i32 row, i32 column_in_tile, i32 tile, float cost, bool& bad) {
#if BANDED
  if (!in_band(s, s.first_row + row, tile * 32 + column_in_tile) || s.first_row + row >= s.n) cost = 2.0f * FORBIDDEN_FROM;
  else
#endif
  bad |= !(cost < FORBIDDEN_FROM);
  ring[ring_step(start, column_in_tile + row, chunks)][row] = cost;
}

// Costs of tile `tile`, by a group of 128 threads; `following` is the tile that will be asked for next.
DEVICE void make_costs(CostMaker& maker, const Params& p, const Strip& s, const Frame& frame, CostShared& shared, Step* ring,
                       i32 chunks, i32 tile, i32 following, i32 thread) {
  const i32 start = ring_start(tile, chunks);
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5);
#if MODE == 0
  const float least = -268435456.0f / (float)(s.n + s.m);  // keeps a path of negative costs from running away
  float costs[STRIP_ROWS / 4];
  UNROLL for (int i = 0; i < STRIP_ROWS / 4; i++) costs[i] = to_float(maker.next[i]);
  if (following >= 0) fetch_costs(maker.next, p, s, following, thread);
  UNROLL for (int i = 0; i < STRIP_ROWS / 4; i++) {
    i32 r = warp + i * 4, row = s.first_row + r;
    float v = 2.0f * FORBIDDEN_FROM;
    if (row < s.n && in_band(s, row, tile * 32 + lane)) {
      v = (float)((double)costs[i] * p.scale);
      bool infinite = costs[i] > 3.4028235e38f;
      maker.bad |= !infinite && !(v < FORBIDDEN_FROM && v > least);
      if (!(v > -FORBIDDEN_FROM)) v = 0.0f;
    }
    ring[ring_step(start, lane + r, chunks)][r] = v;
  }
#elif MODE == 1
  Features y = features_y(p, s);
  stage_direct(shared.y, maker.next, y, thread);
  if (following >= 0) maker.next = fetch_direct(y, following, thread);
  group_barrier(maker.barrier, GROUP);
  const float scale = (float)p.scale;
  UNROLL_BY(2) for (int c = 0; c < 8; c++) {
    i32 column = warp * 8 + c;
    float sum[LANE_ROWS], lost[LANE_ROWS];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) sum[q] = lost[q] = 0.0f;
    UNROLL for (int k = 0; k < DIMS; k++) {
      float v = shared.y[column][k];
      UNROLL for (int q = 0; q < LANE_ROWS; q++) {
        float difference = maker.x[q][k] - v;
#if DIMS > 4
        // Kahan's sum: the last bits of a distance decide between nearly equal paths.
        float term = multiply_add(difference, difference, -lost[q]);
        float total = sum[q] + term;
        lost[q] = (total - sum[q]) - term;
        sum[q] = total;
#else
        sum[q] = multiply_add(difference, difference, sum[q]);
#endif
      }
    }
    UNROLL for (int q = 0; q < LANE_ROWS; q++)
      put_cost(ring, start, chunks, s, lane + q * 32, column, tile, sum[q] * scale, maker.bad);
  }
#else
  const i32 g = lane >> 2, t = lane & 3, matrix = lane >> 3;
  const i32 first_column_tile = warp / ROW_TILES * COLUMN_TILES;
  const float frame_factor = frame_scale(frame);
  PlaneRow* y_planes = shared.y[0];
  // As load_x_fragment, for y: features 0-7 and 8-15, columns 0-7 and 8-15 of a pair of column tiles.
  auto load_y_fragment = [&](u32 (&b)[4], int plane, i32 pair, i32 k_step) {
    load_matrices(b, &y_planes[plane * 32 + (first_column_tile + pair * 2 + (matrix >> 1)) * 8 + (lane & 7)][k_step * 16 + (matrix & 1) * 8]);
  };
#if SLICED
  // Tensor cores truncate their sums: slices are summed outside of them.
  Squares squares{shared.y_squares, {}};
  float total[COLUMN_TILES][4];
  UNROLL for (int c = 0; c < COLUMN_TILES; c++) UNROLL for (int e = 0; e < 4; e++) total[c][e] = 0.0f;
  UNROLL_BY(1) for (i32 slice = 0; slice * DIMS < p.d; slice++) {
    const float* centre = frame.centre + slice * DIMS;
    // Whoever is here has passed the barrier of the slice before, so all are done with the products of the one before it.
    PlaneRow* x_planes = shared.x[slice & 1];
    y_planes = shared.y[slice & 1];
    if (!has_centres(slice)) {
      set_centre(shared.centre, p, s, slice, thread);
      group_barrier(maker.barrier, GROUP);
      centre = shared.centre;
    }
    const Quad shift = shift_of(centre, frame_factor, thread);
    maker.bad |= stage_rows(y_planes, 32, maker.next, p.d, shift, frame_factor, &squares, slice, thread);
    stage_x(x_planes, maker.own, p.d, shift, frame_factor, slice, thread);
    const bool last = (slice + 1) * DIMS >= p.d;  // then the next is the following tile's first
    if (last && following >= 0) maker.next_rows = pointers_to(frame.y, following * 32, thread);
    maker.own = fetch_x(maker.own_rows, last ? 0 : slice + 1, p.d, thread);
    maker.next = fetch_slice(maker.next_rows, last ? 0 : slice + 1, p.d, thread);
    group_barrier(maker.barrier, GROUP);
    UNROLL for (int pair = 0; pair < COLUMN_TILES / 2; pair++) {  // one at a time, for want of registers
      float product[2][4], cross[2][4];
      UNROLL for (int c = 0; c < 2; c++) UNROLL for (int e = 0; e < 4; e++) product[c][e] = cross[c][e] = 0.0f;
      UNROLL_BY(2) for (i32 k_step = 0; k_step < K_STEPS; k_step++) {
        u32 x[PLANES][4], b[PLANES][1][4];
        load_x_fragment(x, x_planes, k_step, thread);
        UNROLL for (int plane = 0; plane < PLANES; plane++) load_y_fragment(b[plane][0], plane, pair, k_step);
        multiply(product, cross, x, b);
      }
      UNROLL for (int c = 0; c < 2; c++) UNROLL for (int e = 0; e < 4; e++) total[pair * 2 + c][e] += product[c][e] + cross[c][e] * LOW_PLANE;
    }
  }
#else
  float product[COLUMN_TILES][4], cross[COLUMN_TILES][4];
  UNROLL for (int c = 0; c < COLUMN_TILES; c++) UNROLL for (int e = 0; e < 4; e++) product[c][e] = cross[c][e] = 0.0f;
  Squares squares{shared.y_squares};
  maker.bad |= stage_rows(y_planes, 32, maker.next, p.d, shift_of(frame.centre, frame_factor, thread), frame_factor, &squares, 0, thread);
  if (following >= 0) maker.next = fetch_rows(frame.y, following * 32, thread);
  group_barrier(maker.barrier, GROUP);
#if KEEP_X
  UNROLL for (int k_step = 0; k_step < K_STEPS; k_step++) {
    const u32 (&x)[PLANES][4] = maker.x[k_step];
#else
  const i32 k_steps = FIT == 2 ? K_STEPS : (p.d + 15) / 16;
  UNROLL_BY(2) for (i32 k_step = 0; k_step < k_steps; k_step++) {
    u32 x[PLANES][4];
    load_x_fragment(x, frame.x, k_step, thread);
#endif
    u32 b[PLANES][COLUMN_TILES / 2][4];
    UNROLL for (int plane = 0; plane < PLANES; plane++)
      UNROLL for (int pair = 0; pair < COLUMN_TILES / 2; pair++) load_y_fragment(b[plane][pair], plane, pair, k_step);
    multiply(product, cross, x, b);
  }
#endif
  const float scale = (float)p.scale, unscale = frame_unscale(frame), twice = 2.0f * unscale * unscale;
  const i32 first_row = (warp % ROW_TILES) * 16 + g;
  float x_squares[2] = {frame.x_squares[first_row], frame.x_squares[first_row + 8]}, y_squares[COLUMN_TILES][2];
  UNROLL for (int c = 0; c < COLUMN_TILES; c++)
    UNROLL for (int e = 0; e < 2; e++) y_squares[c][e] = shared.y_squares[(first_column_tile + c) * 8 + 2 * t + e];
  UNROLL for (int c = 0; c < COLUMN_TILES; c++)
    UNROLL for (int e = 0; e < 4; e++) {
      i32 row = first_row + (e >> 1) * 8, column = (first_column_tile + c) * 8 + 2 * t + (e & 1);
#if SLICED
      float inner = total[c][e];
#else
      float inner = product[c][e] + cross[c][e] * LOW_PLANE;
#endif
      float distance = (x_squares[e >> 1] + y_squares[c][e & 1]) - twice * inner;
      // Rounding can leave a little less than zero. NaN stays, and an overflown product becomes one: both are flagged.
      if (distance < 0.0f) distance = distance > -3.0e38f ? 0.0f : distance - distance;
      put_cost(ring, start, chunks, s, row, column, tile, distance * scale, maker.bad);
    }
#endif
}

DEVICE void report(const Params& p, const Strip& s, bool bad) {
  if (bad) { clear_bits(&p.health[s.pair], 1u); clear_bits(&p.health[p.batch], 1u); }
}

// A lane's rows, read and written in one access.
struct alignas(4 * LANE_ROWS) LaneReals { float row[LANE_ROWS]; };
// What eight steps read from shared memory, read before any of them writes there: a store in between would hold every
// later load back until its own value is known.
struct EightSteps { LaneReals cost[8]; StoredState top[8]; };
DEVICE EightSteps read_ahead(const Step* costs, const StoredState* top) {
  EightSteps ahead;
  UNROLL for (int k = 0; k < 8; k++) ahead.cost[k] = *(const LaneReals*)&costs[k][lane_index() * LANE_ROWS];
  UNROLL for (int k = 0; k < 8; k++) ahead.top[k] = top[k];
  return ahead;
}

// ---- forward
struct alignas(16) ForwardShared {
  alignas(16) Step costs[FORWARD_CHUNKS * 32];
  Frame frame;
  CostShared making;
  StoredState top[32], bottom[32];
  u32 ticket;
};

static_assert(sizeof(ForwardShared) <= FORWARD_SHARED, "the launcher asks for too little shared memory");
#define FORWARD_THREADS (32 * 5)
// By all THREADS threads of a block, of which the first FORWARD_THREADS work. ALONE: every pair is one strip, and the
// block's is the pair of its own number.
template <int THREADS, bool ALONE> DEVICE void forward_pass(const Params& p, ForwardShared& shared) {
  const i32 lane = (i32)lane_index(), warp = (i32)warp_index();
  if (!ALONE && thread_index() == 0) shared.ticket = next_ticket(p);
#if BANDED
  const float blank = 2.0f * FORBIDDEN_FROM;
#else
  const float blank = 0.0f;
#endif
  fill_ring<THREADS>(&shared.costs[0][0], FORWARD_CHUNKS * 32 * STEP_STRIDE, blank);
  block_barrier();
  const Assignment mine = ALONE ? Assignment{(i32)block_index(), 0} : assignment_of(p, shared.ticket);
  const Strip s = strip_of(p, mine.pair, mine.turn);
  if (!s.valid) {
    if (s.index == 0 && thread_index() == 0) ((result_type*)p.value)[s.pair] = float_of(0x7fc00000u);
    return;
  }
  if (!s.present) return;
  make_frame<THREADS>(shared.frame, p, s);
  const i32 begin = first_chunk(s), finish = last_step(s) / 32, tiles_end = last_tile(s);

  if (THREADS > FORWARD_THREADS && warp >= FORWARD_THREADS / 32) {
    for (i32 chunk = begin - 1; chunk <= finish; chunk++) block_barrier();
    return;
  }
  if (warp > 0) {  // the cost makers
    const i32 thread = (i32)thread_index() - 32;
    CostMaker maker = open_costs(p, s, shared.frame, ALONE ? FORWARD_COST_BARRIER : COST_BARRIER, begin, thread);
    for (i32 chunk = begin - 1; chunk <= finish; chunk++) {
      const i32 tile = chunk + 1;
      if (tile <= tiles_end)
        make_costs(maker, p, s, shared.frame, shared.making, shared.costs, FORWARD_CHUNKS, tile, tile < tiles_end ? tile + 1 : -1,
                   FORWARD_COSTS_ANEW ? afresh(thread) : thread);
      block_barrier();
    }
    report(p, s, maker.bad);
    return;
  }

  // The walker.
  const u32 owner_in = (u32)(s.index - 1), owner_out = (u32)s.index;
  const HandoffRow row = handoff_row(p, s.pair);
  StoredState* bound = saved_bound(p, s, s.index);
  Walker w = first_walker(s);
  const i32 end = s.is_last ? final_step(s) : -1;
  Scaled result = no_path();
  const i32 leaving = s.is_last ? s.n - 1 - s.first_row : STRIP_ROWS - 1;
  // The row above is asked for one part ahead; only if it was not there yet is it polled.
  RowWord ahead{};
  bool wanted = s.index > 0 && lane < HANDOFF && in_band(s, s.first_row - 1, begin * 32 + lane);
  if (wanted) ahead = load_word(row, begin * 32 + lane);
  block_barrier();
  for (i32 chunk = begin; chunk <= finish; chunk++) {
    const i32 base = chunk * 32;
    const Step* costs = shared.costs + ring_start(chunk, FORWARD_CHUNKS);
    if (chunk % CHUNKS_PER_CHECKPOINT == 0) keep_walker(p, s, chunk / CHUNKS_PER_CHECKPOINT, w);
    UNROLL_BY(1) for (i32 part = 0; part < 32; part += HANDOFF) {
      StoredState top{(real)EMPTY_FRACTION, (exponent)NO_PATH};
      if (wanted) {
        if (!is_from(ahead, owner_in)) ahead = await_word(row, base + part + lane, owner_in);
        Scaled z = unpack_state(ahead);
        top = StoredState{z.f, z.n};
      }
      if (lane < HANDOFF) shared.top[lane] = top;
      wanted = s.index > 0 && lane < HANDOFF && in_band(s, s.first_row - 1, base + part + HANDOFF + lane);
      if (wanted) ahead = load_word(row, base + part + HANDOFF + lane);
      warp_barrier();
      // The row that leaves the strip: the bottom one for the next strip, or the pair's last for its result.
      auto walk = [&](auto last_strip) {
        UNROLL_BY(1) for (i32 eight = 0; eight < HANDOFF; eight += 8) {
          const EightSteps ahead8 = read_ahead(costs + part + eight, shared.top + eight);
          UNROLL for (i32 k = 0; k < 8; k++) {
            advance(w, ahead8.cost[k].row, ahead8.top[k], [](int, const Terms&, real) {});
            if (decltype(last_strip)::value) {
              if (lane == leaving / LANE_ROWS) shared.bottom[eight + k] = row_of(w, leaving % LANE_ROWS);
            } else {
              if (lane == 31) shared.bottom[eight + k] = row_of(w, LANE_ROWS - 1);
            }
          }
          if (eight & 8) renormalize(w);
        }
      };
      if (s.is_last) walk(Yes{});
      else walk(No{});
      warp_barrier();
      i32 column = base + part + lane - (STRIP_ROWS - 1);
      if (!s.is_last && lane < HANDOFF && in_band(s, s.first_row + STRIP_ROWS - 1, column)) {
        StoredState z = shared.bottom[lane];
        store_word(row, column, pack_state(Scaled{z.f, z.n}, owner_out));
        if (p.save) bound[column] = z;
      }
      if (end >= base + part && end < base + part + HANDOFF) {
        StoredState z = shared.bottom[end - base - part];
        result = Scaled{z.f, z.n};
      }
      warp_barrier();
    }
    block_barrier();
  }
  if (s.is_last && lane == 0) {
    ((result_type*)p.value)[s.pair] = (result_type)(((double)result.n - log2_exact((double)result.f)) * p.unscale);
    report(p, s, result.n >= 1 << 29);
  }
}
#if HAS_FORWARD
KERNEL THREADS_PER_BLOCK(FORWARD_THREADS, FORWARD_BLOCKS) tiled_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  forward_pass<FORWARD_THREADS, false>(p, *(ForwardShared*)memory);
}
#endif

// ---- backward
#define KEEP_LEFT BANDED
struct alignas(8 * LANE_ROWS) LaneShares { float up[LANE_ROWS], diagonal[LANE_ROWS]; };
struct GradShared {
#if MODE == 3
#if SLICED
  alignas(16) PlaneRow x[BUFFERS][PLANES * STRIP_ROWS];
  float centre[DIMS];
#endif
  alignas(16) PlaneRow y[BUFFERS][PLANES * 32];
#elif MODE == 1
  float x[STRIP_ROWS][DIMS];
  float y[32][DIMS];
  float part[4][STRIP_ROWS][DIMS + 1];
#else
  float nothing;
#endif
};
struct Turn { i32 first, last; };  // of the strips that add to a tile of gY, in the order of the walk

// ---- where there is mass
// E is next to nothing but for a neighbourhood of the likely paths, and moves up and left only. So a strip begins where mass
// can first come to it and ends when all of it has left; what it does not visit has E = 0.
//
//   begins   at the last tile in which the strip p.lead before it in the walk was given mass: it goes no further right. The
//            first strips begin at their last column. (p.lead > 1: a strip makes its costs and walks its first checkpoint
//            while the mass is still on its way.)
//   visits   for gradients the tiles from the last in which it was given mass itself.
//   ends     once its own cells have nothing left to pass on, the strip below has ended, and it has come as far as that.
//
// So of the tiles of a strip, neither the first nor the last is right of those of the strip below, and the strips that add
// to one tile of gY are neighbours: the lowest of them stores, the others add.
//
// A strip tells the others by two words behind the pair's hand-off row: the tile of its first mass, as a word of the
// hand-off, and its last chunk, released once all before it is stored. Who waits for a word of the row, or for a turn at
// gY, asks for the end as well. Every strip says both at last, whatever comes to it, so nobody waits for ever: the tiles
// between the two are visited, and the columns from the last chunk on are stored, each in its turn. And nobody writes where
// somebody is still to read: who stores a word has read his neighbour's there, or knows that it has ended.
//
// How far a strip goes beyond its neighbour's end depends on when it learns of it. It changes no bit: what is left to pass
// on is set to zero, ended or not; E = 0 changes no sum; and the first to store a sum of gY stores what adding it to zero
// would have left.
//
// With one row to a lane the mass of a tile is known too late; such strips begin at their last column and visit everything.
#define KNOWS_IN_TIME (LANE_ROWS > 1)

// What a block has to do. Slot t: recompute does chunk t of its order while t < chunks; the sweep is
// CHUNKS_PER_CHECKPOINT slots behind and at chunk `top_chunk - (t - CHUNKS_PER_CHECKPOINT)`; gradients of a tile follow
// the sweep of its first chunk by one. Kept in shared memory, since products need the registers.
struct Course {
  Strip strip;
  i32 first_tile_below, last_tile_below;  // of those that the strip below touches, and may have added to
  i32 last_tile_above;                    // of those that the strip above touches
  i32 walk_index, last_checkpoint, chunks, top_chunk, slots;
  i32 last_tile;    // where it begins
  i32 needed;       // the leftmost tile that recompute needs in its first slot
  bool visits_all;  // that the strip touches, not only from its first mass on
  bool whole;       // and does not end before its first column: a pair without a path, or poisoned
};
// `start`: the last chunk in which the strip can have mass.
DEVICE Course course_of(const Params& p, const Strip& s, i32 walk_index, i32 start, bool whole) {
  Course c;
  const Strip below = strip_of(p, s.pair, s.index + 1), above = strip_of(p, s.pair, s.index - 1);
  c.strip = s;
  c.last_tile_above = s.index == 0 ? -1 : last_tile(above);
  c.visits_all = whole || !KNOWS_IN_TIME;
  c.first_tile_below = first_tile(below);
  c.last_tile_below = s.is_last ? -1 : last_tile(below);
  c.walk_index = walk_index;
  c.whole = whole;
  c.last_checkpoint = start / CHUNKS_PER_CHECKPOINT;
  c.chunks = (c.last_checkpoint - first_checkpoint(s) + 1) * CHUNKS_PER_CHECKPOINT;
  c.top_chunk = (c.last_checkpoint + 1) * CHUNKS_PER_CHECKPOINT - 1;  // the sweep's first
  c.slots = c.chunks + CHUNKS_PER_CHECKPOINT + 1;
  c.last_tile = last_tile(s) < c.top_chunk ? last_tile(s) : c.top_chunk;
  c.needed = c.last_checkpoint * CHUNKS_PER_CHECKPOINT - LANE_ROWS;
  return c;
}

// Which of two places a slot has: by its number, or by the tile that gradients work on, as takes fewer registers.
DEVICE i32 place_of_slot(const Course& c, i32 slot) { return (SPILLS_EASILY ? c.top_chunk + CHUNKS_PER_CHECKPOINT + 1 - slot : slot) & 1; }
DEVICE i32 place_of_tile(const Course& c, i32 tile) { return (SPILLS_EASILY ? tile : c.top_chunk + CHUNKS_PER_CHECKPOINT + 1 - tile) & 1; }

struct alignas(16) BackwardShared {
  alignas(16) Step costs[COST_CHUNKS * 32];
  alignas(16) Step align[ALIGN_CHUNKS * 32];
  LaneShares shares[SHARE_SLOTS][32][32];
  LaneReals left[KEEP_LEFT ? SHARE_SLOTS : 1][32][32];
  Frame frame;
  CostShared making;
  GradShared grads;
  StoredState top[32];
  float passed_in[32], passed_out[32];
  // What one role tells the others, written in a slot and read in the next: two of each, in turns.
  i32 more[2];       // by place_of_slot: whether another slot follows
  i32 below_end[2];  // by the slot's number: the last chunk of the strip below, NOWHERE while it has none
  i32 mass_tile[2];  // by the sweep's chunk: the last with mass, NOWHERE while there is none
  i32 visit[2];      // by tile: whether gradients are to be made of it
  Turn turn[2];      // by tile: at gY
  Course course;
  u32 ticket;
};

// Where nothing is forbidden the left share is what the other two leave of E, and need not be kept; next to a forbidden
// cell it must be exactly nothing, so there it is.
// Where the shares of a chunk live. With two chunks to a checkpoint the second always uses slot 1 and the first takes
// turns between 0 and 2: the sweep still reads it while the next checkpoint's first chunk is recomputed.
DEVICE i32 share_slot(i32 order, i32 sub) {
#if CHUNKS_PER_CHECKPOINT == 1
  return order & 1;
#else
  return sub == 1 ? 1 : (order & 1) * 2;
#endif
}

// ---- gradients of the tile that the sweep has just completed: gX by one group of 128 threads, which also brings the
// tile's y to shared memory, gY by another
DEVICE float align_at(const Step* ring, i32 start, i32 row, i32 column) {
  return ring[ring_step(start, column + row, ALIGN_CHUNKS)][row];
}
DEVICE void meet_for_gradients() { group_barrier(GRAD_BARRIER, 2 * GROUP); }

#if MODE == 0
// Half of the tile's rows.
DEVICE void write_alignment(const Params& p, const Strip& s, const Step* ring, i32 tile, float factor, i32 half, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, column = tile * 32 + lane;
  for (i32 r = half * 4 + (thread >> 5); r < STRIP_ROWS; r += 8) {
    i32 row = s.first_row + r;
    if (row < s.n && column < s.m) {
      float e = align_at(ring, start, r, lane);
      // At most 2^-66 leaks through forbidden cells, far below the last bit of anything: exactly zero.
      e = in_band(s, row, column) && !(e < 1.0e-19f) ? e * factor : 0.0f;
      store_gradient(p.grad_x, ((i64)s.pair * p.n + row) * p.m + column, e, p.grad_x_wide);
    }
  }
}
#endif

#if MODE == 3
#define GX_TILES ((DIMS / 8) / WARPS_PER_ROW_TILE)  // 8 features each, per warp
#define GY_TILES (DIMS < 64 ? DIMS / 16 : 4)     // and at a time, of which there are GY_PASSES
#define GY_PASSES (DIMS / 16 / GY_TILES)
#define TILES_AT_ONCE 2  // of gX: more than these there are no registers for beside its sums
#if DIMS > 64 && INPUT == 0 && !SPILLS_EASILY
#define HALVES_UNROLLED 2  // by which the compiler keeps fewer addresses
#else
#define HALVES_UNROLLED 1
#endif
#endif

#if MODE == 3
// Puts two neighbours of a sum of gradients into memory or adds them there, as many as are `left` in their row.
DEVICE void put_sum(float* at, i32 left, bool first, Pair v) {
#if FIT
  if (FIT != 2 && left < 2) return;
  if (first) *(Pair*)at = Pair{as_added(v.a), as_added(v.b)};
  else add_to((Pair*)at, v);
#else
  if (left >= 1) { if (first) at[0] = as_added(v.a); else add_to(at, v.a); }
  if (left >= 2) { if (first) at[1] = as_added(v.b); else add_to(at + 1, v.b); }
#endif
}
#endif

// -- gX
struct GradX {
#if MODE == 3
  float row_sum[2];  // of E
#if !SLICED
  float sum[GX_TILES][4];
#endif
#if LOOKS_AHEAD
  RowBlock next;  // y of the next tile or slice
#endif
#if SLICED
  RowPointers next_rows;
#endif
#elif MODE == 1
  float sum[LANE_ROWS][DIMS], x[LANE_ROWS][DIMS];
  DirectRows next;
#endif
};

// What a tile needs of memory, asked for one tile ahead.
DEVICE void look_ahead(GradX& maker, const Params& p, const Strip& s, const Frame& frame, i32 tile, i32 thread) {
#if MODE == 1
  maker.next = fetch_direct(features_y(p, s), tile, thread);
#elif MODE == 3 && SLICED
  maker.next_rows = pointers_to(frame.y, tile * 32, thread);
  maker.next = fetch_slice(maker.next_rows, 0, p.d, thread);
#elif MODE == 3 && LOOKS_AHEAD
  maker.next = fetch_rows(frame.y, tile * 32, thread);
#endif
}

DEVICE GradX open_grad_x(const Params& p, const Strip& s, const Frame& frame, GradShared& shared, i32 first, i32 thread) {
  GradX maker;
  look_ahead(maker, p, s, frame, first, thread);
#if MODE == 3
  maker.row_sum[0] = maker.row_sum[1] = 0.0f;
#if !SLICED
  UNROLL for (int i = 0; i < GX_TILES; i++) UNROLL for (int e = 0; e < 4; e++) maker.sum[i][e] = 0.0f;
#endif
#elif MODE == 1
  Features x = features_x(p, s);
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    UNROLL for (int k = 0; k < DIMS; k++) {
      maker.sum[q][k] = 0.0f;
      maker.x[q][k] = feature(x, s.first_row + (thread & 31) + q * 32, k);
    }
  for (i32 i = thread; i < STRIP_ROWS * DIMS; i += GROUP) shared.x[i / DIMS][i % DIMS] = feature(x, s.first_row + i / DIMS, i % DIMS);
#endif
  return maker;
}

#if MODE == 1
DEVICE void make_grad_x(GradX& maker, const Params& p, const Strip& s, GradShared& shared, const Step* ring, i32 tile, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
  Features y = features_y(p, s);
  stage_direct(shared.y, maker.next, y, thread);
  if (tile > first_tile(s)) maker.next = fetch_direct(y, tile - 1, thread);
  meet_for_gradients();
  if (!p.grad_x) return;
  UNROLL_BY(2) for (int c = 0; c < 8; c++) {
    i32 column = warp * 8 + c;
    float e[LANE_ROWS];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) e[q] = align_at(ring, start, lane + q * 32, column);
    UNROLL for (int k = 0; k < DIMS; k++) {
      float y = shared.y[column][k];
      UNROLL for (int q = 0; q < LANE_ROWS; q++) maker.sum[q][k] += e[q] * (maker.x[q][k] - y);
    }
  }
}
#elif MODE == 3
DEVICE void make_grad_x(GradX& maker, const Params& p, const Strip& s, const Frame& frame, GradShared& shared, const Step* ring, i32 tile,
                        bool first_time, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
  const i32 g = lane >> 2, t = lane & 3, matrix = lane >> 3;
  const i32 row_tile = (warp % ROW_TILES) * 16, first_tile_of_warp = warp / ROW_TILES * GX_TILES;
  const Features& y = frame.y;
  PlaneRow* y_planes = shared.y[0];
  const float scale = frame_scale(frame);
#if !SLICED
#if LOOKS_AHEAD
  stage_rows(y_planes, 32, maker.next, p.d, shift_of(frame.centre, scale, thread), scale, nullptr, 0, thread);
  if (tile > first_tile(s)) maker.next = fetch_rows(y, (tile - 1) * 32, thread);
#elif DIMS <= 64
  const RowBlock block = fetch_rows(y, tile * 32, thread);
  stage_rows(y_planes, 32, block, p.d, shift_of(frame.centre, scale, thread), scale, nullptr, 0, thread);
#else
  UNROLL_BY(1) for (i32 half = 0; half < 2; half++) {
    const Rows<16> block = fetch_rows<16>(y, tile * 32 + half * 16, thread);
    stage_rows(y_planes + half * 16, 32, block, p.d, shift_of(frame.centre, scale, thread), scale, nullptr, 0, thread);
  }
#endif
#endif
  // 16 columns of the strip's rows of E as a fragment of A, added to the sums of rows.
  auto read_align = [&](u32 (&e)[ALIGN_PLANES][4], i32 first_column) {
#if PLANE_BY_PLANE
    const i32 lane = (i32)(thread_index_afresh() & 31u), g = lane >> 2, t = lane & 3;
#endif
    UNROLL for (int r = 0; r < 4; r++) {
      i32 row = row_tile + g + (r & 1) * 8, column = first_column + 2 * t + (r >> 1) * 8;
      float a = align_at(ring, start, row, column), b = align_at(ring, start, row, column + 1);
      maker.row_sum[r & 1] += a + b;
      u32 planes[ALIGN_PLANES];
      split(planes, a, b);
      UNROLL for (int plane = 0; plane < ALIGN_PLANES; plane++) e[plane][r] = planes[plane];
    }
  };
#if SLICED
  u32 e_rows[2][ALIGN_PLANES][4];
  UNROLL for (int k_step = 0; k_step < 2; k_step++) read_align(e_rows[k_step], k_step * 16);
  // Of this many features the sums are in memory, each element one thread's own.
  float* sums[2];
  bool there[2];
  UNROLL for (int h = 0; h < 2; h++) {
    const i32 row = s.first_row + row_tile + g + h * 8;
    there[h] = p.grad_x && row < s.n;
    sums[h] = (float*)p.sum_x + ((i64)s.pair * p.n + row) * p.d + first_tile_of_warp * 8 + 2 * t;
  }
  UNROLL_BY(1) for (i32 slice = 0; slice * DIMS < p.d; slice++) {
    const float* centre = frame.centre + slice * DIMS;
    y_planes = shared.y[slice & 1];
    if (!has_centres(slice)) {
      set_centre(shared.centre, p, s, slice, thread);
      meet_for_gradients();
      centre = shared.centre;
    }
    stage_rows(y_planes, 32, maker.next, p.d, shift_of(centre, scale, thread), scale, nullptr, slice, thread);
    const bool last = (slice + 1) * DIMS >= p.d;  // then the next is the following tile's first
    if (last && tile > first_tile(s)) maker.next_rows = pointers_to(y, (tile - 1) * 32, thread);
    maker.next = fetch_slice(maker.next_rows, last ? 0 : slice + 1, p.d, thread);
#else
  {
#endif
    meet_for_gradients();
    // gX += E Y: k runs over columns, so y's planes are read transposed.
    auto read_y = [&](u32 (&b)[PLANES][TILES_AT_ONCE / 2][4], i32 k_step, int first) {
      UNROLL for (int plane = 0; plane < PLANES; plane++)
        UNROLL for (int pair = 0; pair < TILES_AT_ONCE / 2; pair++)
          load_matrices_transposed(b[plane][pair], &y_planes[plane * 32 + k_step * 16 + (matrix & 1) * 8 + (lane & 7)]
                                                            [(first_tile_of_warp + first + pair * 2 + (matrix >> 1)) * 8]);
    };
    auto clear = [](float (&c)[TILES_AT_ONCE][4]) {
      UNROLL for (int i = 0; i < TILES_AT_ONCE; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] = 0.0f;
    };
#if SLICED
    if (p.grad_x)
      UNROLL for (int first = 0; first < GX_TILES; first += TILES_AT_ONCE) {
        float c[TILES_AT_ONCE][4], cross[TILES_AT_ONCE][4];
        clear(c);
        clear(cross);
        UNROLL for (int k_step = 0; k_step < 2; k_step++) {
          u32 b[PLANES][TILES_AT_ONCE / 2][4];
          read_y(b, k_step, first);
          multiply(c, cross, e_rows[k_step], b);
        }
        UNROLL for (int i = 0; i < TILES_AT_ONCE; i++)
          UNROLL for (int h = 0; h < 2; h++) {
            const i32 k = slice * DIMS + (first + i) * 8;
            if (there[h])
              put_sum(sums[h] + k, p.d - k - first_tile_of_warp * 8 - 2 * t, first_time,
                      Pair{c[i][h * 2] + cross[i][h * 2] * LOW_PLANE, c[i][h * 2 + 1] + cross[i][h * 2 + 1] * LOW_PLANE});
          }
      }
#else
    if (p.grad_x)
      UNROLL_BY(HALVES_UNROLLED) for (i32 k_step = 0; k_step < 2; k_step++) {
        u32 e_rows[ALIGN_PLANES][4];
        read_align(e_rows, k_step * 16);
        UNROLL for (int first = 0; first < GX_TILES; first += TILES_AT_ONCE) {
          float c[TILES_AT_ONCE][4];
          clear(c);
#if PLANE_BY_PLANE
          // The same product with one plane of y at a time, the first of which is read twice.
          u32 b[4];
          auto read_plane = [&](int plane) {
            load_matrices_transposed(b, &y_planes[plane * 32 + k_step * 16 + (matrix & 1) * 8 + (lane & 7)]
                                                 [(first_tile_of_warp + first + (matrix >> 1)) * 8]);
          };
          auto add_product = [&](const u32 (&a)[4]) {
            UNROLL for (int i = 0; i < TILES_AT_ONCE; i++) mma_input(c[i], a, b[i * 2], b[i * 2 + 1]);
          };
          read_plane(0);
          add_product(e_rows[1]);
          if constexpr (PLANES > 1) {
            read_plane(1);
            add_product(e_rows[0]);
          }
          UNROLL for (int i = 0; i < TILES_AT_ONCE; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] *= LOW_PLANE;
          if constexpr (PLANES > 1) read_plane(0);
          add_product(e_rows[0]);
#else
          u32 b[PLANES][TILES_AT_ONCE / 2][4];
          read_y(b, k_step, first);
          multiply_in_place(c, e_rows, b);
#endif
          UNROLL for (int i = 0; i < TILES_AT_ONCE; i++)
            UNROLL for (int e = 0; e < 4; e++) maker.sum[first + i][e] += c[i][e];
        }
      }
#endif
  }
}
#endif

#if MODE == 3
struct ClosingShared {
  float sum[STRIP_ROWS];
#if !SLICED
  alignas(8) float product[STRIP_ROWS][DIMS + 8];
#endif
};
#else
struct ClosingShared {};
#endif
#if MODE != 0
// Leaves the group's sums in shared memory, for the whole block to close the strip.
DEVICE void leave_sums(GradX& maker, GradShared& shared, ClosingShared& rows, i32 thread) {
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5);
#if MODE == 1
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    UNROLL for (int k = 0; k < DIMS; k++) shared.part[warp][lane + q * 32][k] = maker.sum[q][k];
#else
  const i32 g = lane >> 2, t = lane & 3, row_tile = (warp % ROW_TILES) * 16;
  UNROLL for (int h = 0; h < 2; h++) {
    maker.row_sum[h] += from_lane_xor(maker.row_sum[h], 1);
    maker.row_sum[h] += from_lane_xor(maker.row_sum[h], 2);
  }
  if (t == 0 && warp < ROW_TILES)  // with fewer tiles than warps two have the same rows
    UNROLL for (int h = 0; h < 2; h++) rows.sum[row_tile + g + h * 8] = maker.row_sum[h];
#if !SLICED
  UNROLL for (int i = 0; i < GX_TILES; i++)
    UNROLL for (int h = 0; h < 2; h++)
      *(Pair*)&rows.product[row_tile + g + h * 8][(warp / ROW_TILES * GX_TILES + i) * 8 + 2 * t] =
          Pair{maker.sum[i][h * 2], maker.sum[i][h * 2 + 1]};
#endif
#endif
}

// gX of the strip from its sums, by all THREADS threads of a block.
template <int THREADS>
DEVICE void close_grad_x(const Params& p, const Strip& s, const Frame& frame, const GradShared& shared, const ClosingShared& rows) {
  const float factor = gradient_of_value(p, s.pair);
#if MODE == 1
  for (i32 i = (i32)thread_index_afresh(); i < STRIP_ROWS * DIMS; i += THREADS) {
    i32 r = i / DIMS, k = i % DIMS;
    float sum = (shared.part[0][r][k] + shared.part[1][r][k]) + (shared.part[2][r][k] + shared.part[3][r][k]);
    if (s.first_row + r < s.n && k < p.d)
      store_gradient(p.grad_x, ((i64)s.pair * p.n + s.first_row + r) * p.d + k, 2.0f * factor * sum, p.grad_x_wide);
  }
#else
  // A warp has eight rows, and 32 neighbouring features at a time.
  constexpr i32 EIGHTS = STRIP_ROWS / 8;
  const i32 own = (i32)thread_index_afresh(), lane = own & 31, warp = own >> 5, first = warp % EIGHTS * 8;
  const i32 count = s.n - s.first_row - first;  // of the eight, those that there are
  if (count <= 0) return;
  Features x = features_x(p, s);
  const float unscale = frame_unscale(frame);
  const i64 start = ((i64)s.pair * p.n + s.first_row + first) * p.d;
  const element* from = x.rows + (i64)(s.first_row + first) * p.d;
  UNROLL_BY(1) for (i32 k = warp / EIGHTS * 32 + lane; k < p.d; k += THREADS / EIGHTS) {
    element v[8];
    float product[8];
    UNROLL for (int i = 0; i < 8; i++) {
      const i32 offset = (i < count ? i : count - 1) * p.d + k;
      v[i] = from[offset];
#if SLICED
      product[i] = load_fresh((const float*)p.sum_x + start + offset);
#else
      product[i] = rows.product[first + i][k];
#endif
    }
#if SLICED
    const float centre = centre_at(frame, x, x, s, k);
#else
    const float centre = frame.centre[k];
#endif
    UNROLL for (int i = 0; i < 8; i++)
      if (i < count)
        store_gradient(p.grad_x, start + i * p.d + k,
                       2.0f * factor * ((to_float(v[i]) - centre) * rows.sum[first + i] - product[i] * unscale), p.grad_x_wide);
  }
#endif
}
#endif

// -- gY
// Strips add to a tile of gY in turn: the first stores, the others add. Only the last strip of 16-bit gradients has to
// read the sum, for it stores it elsewhere.
DEVICE bool must_read(const Turn& turn) { return INPUT != 0 && turn.last && !turn.first; }
#if MODE == 3
// Two neighbours of gY, as many of them as there are.
DEVICE Pair get_gy(const Params& p, i64 at, i32 left) {
  const float* from = (const float*)p.sum_y + at;
#if GY_PASSES > 1
  if (left < 1) return Pair{0.0f, 0.0f};  // a warp ahead may be writing there already
#endif
#if FIT == 2
  return load_fresh((const Pair*)from);
#elif FIT == 1
  return load_fresh((const Pair*)(left >= 2 ? from : from + left - 2));
#else
  // Past the last feature, that one again: it is this strip's turn to read it.
  return Pair{load_fresh(left >= 1 ? from : from + left - 1), load_fresh(left >= 2 ? from + 1 : from + left - 1)};
#endif
}
DEVICE void put_gy(const Params& p, const Turn& turn, i64 at, i32 left, Pair v) {
  if (INPUT != 0 && turn.last) {
    if (FIT == 2 || left >= 1) store_gradient(p.grad_y, at, v.a, p.grad_y_wide);
    if (FIT == 2 || left >= 2) store_gradient(p.grad_y, at + 1, v.b, p.grad_y_wide);
  } else {
    put_sum((float*)p.sum_y + at, left, turn.first, v);  // of float32, sum_y is grad_y
  }
}
#endif

#if MODE == 1
#define FEATURES_PER_WARP (DIMS / 4)
DEVICE void make_grad_y(const Params& p, const Strip& s, const Turn& turn, GradShared& shared, const Step* ring, i32 tile,
                        float factor, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
  const i32 columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32, first_feature = warp * FEATURES_PER_WARP;
  const i64 at = ((i64)s.pair * p.m + tile * 32 + (lane < columns ? lane : columns - 1)) * p.d;
  float old[FEATURES_PER_WARP], own[FEATURES_PER_WARP], sum[FEATURES_PER_WARP];
  UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++) old[i] = sum[i] = 0.0f;
  if (p.grad_y && must_read(turn))
    UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++)
      old[i] = load_fresh((const float*)p.sum_y + at + (first_feature + i < p.d ? first_feature + i : p.d - 1));
  meet_for_gradients();
  if (!p.grad_y) return;
  UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++) own[i] = shared.y[lane][first_feature + i];
  UNROLL_BY(8) for (int r = STRIP_ROWS - 1; r >= 0; r--) {
    float e = align_at(ring, start, r, lane);
    UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++) sum[i] += e * (own[i] - shared.x[r][first_feature + i]);
  }
  UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++)
    if (first_feature + i < p.d && lane < columns) {
      const float part = 2.0f * factor * sum[i];
      float* total = (float*)p.sum_y + at + first_feature + i;
      if (INPUT != 0 && turn.last) store_gradient(p.grad_y, at + first_feature + i, old[i] + part, p.grad_y_wide);
      else if (turn.first) *total = as_added(part);
      else add_to(total, part);
    }
}
#elif MODE == 3
#if SLICED
struct GradY {
  OwnRows own;  // x of the next slice
  OwnPointers own_rows;
};
DEVICE GradY open_grad_y(const Params& p, const Strip& s, i32 thread) {
  const OwnPointers rows = pointers_to_x(p, s, thread);
  return GradY{fetch_x(rows, 0, p.d, thread), rows};
}
#else
struct GradY {};
DEVICE GradY open_grad_y(const Params&, const Strip&, i32) { return GradY{}; }
#endif
DEVICE void make_grad_y(GradY& maker, const Params& p, const Strip& s, const Turn& turn, const Frame& frame, GradShared& shared,
                        const Step* ring, i32 tile, float factor, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
  const i32 g = lane >> 2, t = lane & 3, matrix = lane >> 3;
  const i32 columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32;
  const i32 column_tile = (warp & 1) * 16;
  // 16 rows of the tile's E as a fragment of A, transposed, added to the sums of columns.
  float column_sum[2] = {0.0f, 0.0f};
  auto read_align = [&](u32 (&e)[ALIGN_PLANES][4], i32 first_row) {
    UNROLL for (int r = 0; r < 4; r++) {
      i32 column = column_tile + g + (r & 1) * 8, row = first_row + 2 * t + (r >> 1) * 8;
      float low = align_at(ring, start, row, column), high = align_at(ring, start, row + 1, column);
      column_sum[r & 1] += low + high;
      u32 planes[ALIGN_PLANES];
      split(planes, low, high);
      UNROLL for (int plane = 0; plane < ALIGN_PLANES; plane++) e[plane][r] = planes[plane];
    }
  };
  auto sum_up = [&]() {
    UNROLL for (int h = 0; h < 2; h++) {
      column_sum[h] += from_lane_xor(column_sum[h], 1);
      column_sum[h] += from_lane_xor(column_sum[h], 2);
    }
  };
  auto start_of = [&](int h) {  // of a column's features in memory
    const i32 column = column_tile + g + h * 8;
    return ((i64)s.pair * p.m + tile * 32 + (column < columns ? column : columns - 1)) * p.d;
  };
#if SLICED
  u32 e_tile[STRIP_ROWS / 16][ALIGN_PLANES][4];  // the same for every slice
  if (p.grad_y) {
    UNROLL for (int k_step = 0; k_step < STRIP_ROWS / 16; k_step++) read_align(e_tile[k_step], k_step * 16);
    sum_up();
  }
  const i32 first_feature_tile = (warp >> 1) * GY_TILES;
  const i64 starts[2] = {start_of(0) + first_feature_tile * 8 + 2 * t, start_of(1) + first_feature_tile * 8 + 2 * t};
  const float scale = frame_scale(frame), twice = 2.0f * factor * frame_unscale(frame);
  UNROLL_BY(1) for (i32 slice = 0; slice * DIMS < p.d; slice++) {
    PlaneRow* x_planes = shared.x[slice & 1];
    const PlaneRow* y_planes = shared.y[slice & 1];
    if (!has_centres(slice)) meet_for_gradients();  // as the other group does
    if (p.grad_y)
      stage_x(x_planes, maker.own, p.d, shift_of(has_centres(slice) ? frame.centre + slice * DIMS : shared.centre, scale, thread), scale,
              slice, thread);
#else
  UNROLL_BY(1) for (i32 pass = 0; pass < GY_PASSES; pass++) {
    const i32 slice = 0, first_feature_tile = ((warp >> 1) * GY_PASSES + pass) * GY_TILES;
#endif
    // What the strips below have summed, if it has to be read: asked for before the products and used after them.
    Pair old[2][GY_TILES];
    i64 at[2];
    UNROLL for (int h = 0; h < 2; h++) {
#if SLICED
      at[h] = starts[h] + slice * DIMS;
#else
      at[h] = start_of(h) + first_feature_tile * 8 + 2 * t;
#endif
      UNROLL for (int i = 0; i < GY_TILES; i++) old[h][i] = Pair{0.0f, 0.0f};
    }
    if (p.grad_y && must_read(turn))
      UNROLL for (int h = 0; h < 2; h++)
        UNROLL for (int i = 0; i < GY_TILES; i++)
          if (GY_PASSES == 1 || column_tile + g + h * 8 < columns) old[h][i] = get_gy(p, at[h] + i * 8, p.d - slice * DIMS - (first_feature_tile + i) * 8 - 2 * t);
#if SLICED
    if (p.grad_y) maker.own = fetch_x(maker.own_rows, (slice + 1) * DIMS < p.d ? slice + 1 : 0, p.d, thread);
    meet_for_gradients();  // this slice of x and y is there
#else
    const PlaneRow* x_planes = frame.x;
    const PlaneRow* y_planes = shared.y[0];
#endif
    float c[GY_TILES][4], cross[GY_TILES][4];
    if (p.grad_y) {  // gY = E' X: k runs over rows
      UNROLL for (int i = 0; i < GY_TILES; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] = cross[i][e] = 0.0f;
#if SLICED
      UNROLL for (int k_step = 0; k_step < STRIP_ROWS / 16; k_step++) {
        const u32 (&e_columns)[ALIGN_PLANES][4] = e_tile[k_step];
#else
      column_sum[0] = column_sum[1] = 0.0f;
      UNROLL_BY(2) for (int k_step = 0; k_step < STRIP_ROWS / 16; k_step++) {
        u32 e_columns[ALIGN_PLANES][4];
        read_align(e_columns, k_step * 16);
#endif
        u32 b[PLANES][GY_TILES / 2][4];
        UNROLL for (int plane = 0; plane < PLANES; plane++)
          UNROLL for (int pair = 0; pair < GY_TILES / 2; pair++)
            load_matrices_transposed(b[plane][pair], &x_planes[plane * STRIP_ROWS + k_step * 16 + (matrix & 1) * 8 + (lane & 7)]
                                                              [(first_feature_tile + pair * 2 + (matrix >> 1)) * 8]);
        multiply(c, cross, e_columns, b);
      }
#if !SLICED
      sum_up();
#endif
    }
#if !SLICED
    if (pass == 0) meet_for_gradients();  // y is there; the products did not need it
#endif
    if (p.grad_y) {
#if !SLICED
      const float twice = 2.0f * factor * frame_unscale(frame);
#endif
      UNROLL for (int h = 0; h < 2; h++) {
        const i32 column = column_tile + g + h * 8;
        if (column < columns)
          UNROLL for (int i = 0; i < GY_TILES; i++) {
            const i32 k = (first_feature_tile + i) * 8 + 2 * t;
            u32 pair = *(const u32*)&y_planes[column][k];
            float low = low_of(pair), high = high_of(pair);
            if constexpr (PLANES > 1) {
              pair = *(const u32*)&y_planes[32 + column][k];
              low += low_of(pair) * LOW_PLANE;
              high += high_of(pair) * LOW_PLANE;
            }
            put_gy(p, turn, at[h] + i * 8, p.d - slice * DIMS - k,
                   Pair{old[h][i].a + twice * (low * column_sum[h] - (c[i][h * 2] + cross[i][h * 2] * LOW_PLANE)),
                        old[h][i].b + twice * (high * column_sum[h] - (c[i][h * 2 + 1] + cross[i][h * 2 + 1] * LOW_PLANE))});
          }
      }
    }
  }
}
#endif

// Slices leave no registers for a copy of the strip, nor do many features where the compiler spills easily.
#if SLICED || (DIMS > 64 && SPILLS_EASILY && (INPUT == 0 || (INPUT == 3 && FIT < 2)))
typedef const Strip& StripOfGy;
#else
typedef Strip StripOfGy;
#endif
#if SLICED || SPILLS_EASILY || (INPUT == 3 && DIMS == 64 && FIT < 2)
typedef const Turn& TurnOfGy;
#else
typedef Turn TurnOfGy;
#endif
#if COSTS_ANEW
typedef const Strip& StripOfCosts;
#else
typedef Strip StripOfCosts;
#endif

// Which warp does what. Warp w runs on scheduler w % 4; roles are dealt out so that each scheduler issues about as many
// instructions per slot, with the two walks, the longest chains, on schedulers of their own.
#define BACKWARD_THREADS (32 * 16)
enum Role { RECOMPUTE, SWEEP, COSTS, GRAD_X, GRAD_Y, PORTER, IDLE };
// Role, and member of the role's group, of each warp: four bits each, warp 0 in the lowest.
#define ROLES 0x4446334322352210ull
#define MEMBERS 0x2130320031102000ull
DEVICE Role role_of(u32 warp) { return (Role)(i32)(ROLES >> (warp * 4u) & 15u); }
DEVICE i32 own_lane() { return (i32)(thread_index_afresh() & 31u); }
// This thread's number within its group.
DEVICE i32 own_thread() {
  const u32 thread = thread_index_afresh();
  return (i32)((u32)(MEMBERS >> ((thread >> 5) * 4u) & 3u) * 32u + (thread & 31u));
}
static_assert(sizeof(ClosingShared) <= sizeof(BackwardShared::costs) + sizeof(BackwardShared::align),
              "when a strip is closed, costs and alignments, the first of the block's memory, are done with");
static_assert(sizeof(BackwardShared) <= BACKWARD_SHARED, "the launcher asks for too little shared memory");
// By all BACKWARD_THREADS threads of a block; ALONE as in the forward.
template <bool ALONE> DEVICE void backward_pass(const Params& p, BackwardShared& shared) {
  if (!ALONE && thread_index() == 0) shared.ticket = next_ticket(p);
#if BANDED
  const float blank = 2.0f * FORBIDDEN_FROM;
#else
  const float blank = 0.0f;
#endif
  fill_ring<BACKWARD_THREADS>(&shared.costs[0][0], COST_CHUNKS * 32 * STEP_STRIDE, blank);
  fill_ring<BACKWARD_THREADS>(&shared.align[0][0], ALIGN_CHUNKS * 32 * STEP_STRIDE, 0.0f);
  block_barrier();
  const Assignment mine = ALONE ? Assignment{(i32)block_index(), 0} : assignment_of(p, shared.ticket);
  {
    const Strip s = strip_of(p, mine.pair, p.strips - 1 - mine.turn);
    if (!s.valid || !s.present || !(p.health[s.pair] & 1u)) return;
    make_frame<BACKWARD_THREADS>(shared.frame, p, s);
    if (thread_index() == 0) {
      const i32 walk_index = (s.n - 1) / STRIP_ROWS - s.index, from = walk_index - p.lead;
      const float value = ((const float*)p.value)[s.pair];
      const bool whole = !(value - value == 0.0f);
      i32 start = last_step(s) / 32;
      if (KNOWS_IN_TIME && !ALONE && !whole && from >= 0) {
        const i32 last = await_begin(p, handoff_row(p, s.pair), from) + LANE_ROWS;
        if (last < start) start = last > first_chunk(s) ? last : first_chunk(s);
      }
      shared.course = course_of(p, s, walk_index, start, whole);
      UNROLL for (int i = 0; i < 2; i++) {
        shared.mass_tile[i] = shared.below_end[i] = NOWHERE;
        shared.visit[i] = 0;
      }
    }
  }
  block_barrier();
  const Role role = role_of(warp_index());
  // Every role reads its thread and lane for itself: what two of them compute alike, all would keep in registers.
  const Course& course = shared.course;
  ClosingShared& closing = *(ClosingShared*)shared.costs;
  if (role == RECOMPUTE) {
    const i32 lane = own_lane();
    const Strip s = course.strip;
    const i32 last_checkpoint = course.last_checkpoint, chunks = course.chunks;
    const StoredState* bound = saved_bound(p, s, s.index - 1);
    // The row above and the saved state are asked for one slot ahead.
    auto top_of = [&](i32 chunk) {
      bool there = s.index > 0 && in_band(s, s.first_row - 1, chunk * 32 + lane);
      return there ? bound[chunk * 32 + lane] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
    };
    Walker w = fresh_walker(), next = kept_walker(p, s, last_checkpoint);
    StoredState top = top_of(last_checkpoint * CHUNKS_PER_CHECKPOINT);
    block_barrier();
    for (i32 slot = 0;; slot++) {
      if (slot < chunks) {
        const i32 order = slot / CHUNKS_PER_CHECKPOINT, sub = slot % CHUNKS_PER_CHECKPOINT;
        const i32 chunk = (last_checkpoint - order) * CHUNKS_PER_CHECKPOINT + sub;
        if (sub == 0) {
          w = next;
          if (last_checkpoint - order > first_checkpoint(s)) next = kept_walker(p, s, last_checkpoint - order - 1);
        }
        shared.top[lane] = top;
        const i32 following = sub + 1 < CHUNKS_PER_CHECKPOINT ? chunk + 1 : chunk + 1 - 2 * CHUNKS_PER_CHECKPOINT;
        if (slot + 1 < chunks) top = top_of(following);
        warp_barrier();
        const i32 at = share_slot(order, sub);
        const Step* costs = shared.costs + ring_start(chunk, COST_CHUNKS);
        UNROLL_BY(1) for (i32 eight = 0; eight < 32; eight += 8) {
          const EightSteps ahead8 = read_ahead(costs + eight, shared.top + eight);
          UNROLL for (i32 k = 0; k < 8; k++) {
            LaneShares share_of_rows;
            LaneReals left_of_rows;
            advance(w, ahead8.cost[k].row, ahead8.top[k], [&](int q, const Terms& t, real sum) {
              Shares share = shares_of(t, sum);
              share_of_rows.up[q] = share.up;
              share_of_rows.diagonal[q] = share.diagonal;
              left_of_rows.row[q] = share.left;
            });
            shared.shares[at][eight + k][lane] = share_of_rows;
            if (KEEP_LEFT) shared.left[at][eight + k][lane] = left_of_rows;
          }
          if (eight & 8) renormalize(w);
        }
      }
      block_barrier();
      if (!shared.more[place_of_slot(course, slot)]) break;
    }
  } else if (role == SWEEP) {
    const i32 lane = own_lane();
    const Strip s = course.strip;
    const i32 walk_index = course.walk_index, chunks = course.chunks, top_chunk = course.top_chunk;
    const u32 owner_in = (u32)(walk_index - 1), owner_out = (u32)walk_index;
    const HandoffRow row = handoff_row(p, s.pair);
    const float value = ((const float*)p.value)[s.pair];
    const float seed = value - value == 0.0f ? 1.0f : value != value ? value : 0.0f;
    const i32 end = s.is_last ? final_step(s) : -1;
    const u32* end_below = end_of(p, row, walk_index - 1);
    i32 slots = course.slots;  // until the end is known
    const bool has_neighbours = !ALONE && p.row_bytes;
    i32 mass_tile = course.visits_all || s.is_last ? (s.m - 1) / 32 : NOWHERE;
    bool sent = false, ended = false;
    auto tell_mass = [&]() { if (has_neighbours && lane == 0) tell_begin(p, row, walk_index, mass_tile); };
    if (mass_tile != NOWHERE) tell_mass();
    // What each row's last cell sends on; to the left it is `left`, or with a band `left` times left_share. Products and
    // sums are written as the instructions that they are: chosen by the compiler, they would differ from kernel to kernel.
    float left[LANE_ROWS], left_share[LANE_ROWS], diagonal[LANE_ROWS], pass[LANE_ROWS];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = left_share[q] = diagonal[q] = pass[q] = 0.0f;
    i32 column = top_chunk * 32 + lane - (STRIP_ROWS - 1);
    bool wanted = !s.is_last && passes_up(s, s.first_row + STRIP_ROWS, column);
    RowWord ahead{};
    if (wanted) ahead = load_word(row, column);
    block_barrier();
    for (i32 slot = 0;; slot++) {
      const i32 behind = slot - CHUNKS_PER_CHECKPOINT, chunk = top_chunk - behind, base = chunk * 32;
      if (ended && chunk >= 0) {  // of the tiles still to come the rest has no mass
        float* rest = &shared.align[ring_start(chunk, ALIGN_CHUNKS)][0];
        for (i32 i = lane; i < 32 * STEP_STRIDE / 4; i += 32) ((Word4*)rest)[i] = Word4{0u, 0u, 0u, 0u};
      }
      if (behind >= 0 && behind < chunks && !ended) {
        const i32 order = behind / CHUNKS_PER_CHECKPOINT, sub = chunk % CHUNKS_PER_CHECKPOINT;
        const i32 at = share_slot(order, sub);
        float passed_up = 0.0f;
        if (wanted) {
          column = base + lane - (STRIP_ROWS - 1);
          passed_up = (is_from(ahead, owner_in) ? unpack_flow(ahead) : await_flow(row, column, owner_in, end_below).flow).pass;
          if (passed_up < LEAST_MASS) passed_up = 0.0f;
        }
        shared.passed_in[lane] = passed_up;
        const u32 given = lanes_where(passed_up != 0.0f);
        if (mass_tile == NOWHERE && given) {
          mass_tile = (base + highest_bit(given) - (STRIP_ROWS - 1)) / 32;
          tell_mass();
        }
        column = base - 32 + lane - (STRIP_ROWS - 1);
        wanted = !s.is_last && passes_up(s, s.first_row + STRIP_ROWS, column);
        if (wanted) ahead = load_word(row, column);
        warp_barrier();
        Step* align = shared.align + ring_start(chunk, ALIGN_CHUNKS);
        auto sweep_eight = [&](auto with_end, i32 eight) {
          LaneShares shares8[8];
          LaneReals left8[8];
          float in8[8];
          UNROLL for (int k = 0; k < 8; k++) {
            shares8[k] = shared.shares[at][eight + k][lane];
            if (KEEP_LEFT) left8[k] = shared.left[at][eight + k][lane];
            in8[k] = shared.passed_in[eight + k];
          }
          UNROLL for (i32 k = 7; k >= 0; k--) {
            const LaneShares& share = shares8[k];
            float passed = from_lane_below(pass[0]);
            if (lane == 31) passed = in8[k];
            LaneReals e;
            UNROLL for (int q = 0; q < LANE_ROWS; q++) {
              const float come = q + 1 < LANE_ROWS ? pass[q + 1 < LANE_ROWS ? q + 1 : q] : passed;
              e.row[q] = KEEP_LEFT ? multiply_add(left[q], left_share[q], come) : left[q] + come;
              if (decltype(with_end)::value && base + eight + k == end && s.first_row + lane * LANE_ROWS + q == s.n - 1) e.row[q] = seed;
              const float without_up = multiply_add(-e.row[q], share.up[q], e.row[q]);
              left[q] = KEEP_LEFT ? e.row[q] : multiply_add(-e.row[q], share.diagonal[q], without_up);
              if (KEEP_LEFT) left_share[q] = left8[k].row[q];
              pass[q] = multiply_add(e.row[q], share.up[q], diagonal[q]);
              diagonal[q] = e.row[q] * share.diagonal[q];
            }
            *(LaneReals*)&align[eight + k][lane * LANE_ROWS] = e;
            if (lane == 0) shared.passed_out[eight + k] = pass[0];
          }
        };
        UNROLL_BY(1) for (i32 eight = 24; eight >= 0; eight -= 8) {
          if (end >= base + eight && end < base + eight + 8) sweep_eight(Yes{}, eight);
          else sweep_eight(No{}, eight);
        }
        warp_barrier();
        const bool passes = s.index > 0 && passes_up(s, s.first_row, base + lane);
        if (passes) store_word(row, base + lane, pack_flow(Flow{shared.passed_out[lane], 0.0f}, owner_out));
        sent |= any_lane(passes && !(shared.passed_out[lane] < LEAST_MASS));
        bool some = false;
        UNROLL for (int q = 0; q < LANE_ROWS; q++) {
          const float leftwards = KEEP_LEFT ? left[q] * left_share[q] : left[q];
          some |= !(leftwards < LEAST_MASS && diagonal[q] < LEAST_MASS && pass[q] < LEAST_MASS);
        }
        const bool quiet = !course.whole && !any_lane(some);
        if (quiet)  // whether it ends or not, so that E does not depend on when it learns of the other's end
          UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = left_share[q] = diagonal[q] = pass[q] = 0.0f;
        if (quiet && (s.is_last ? base <= end : chunk <= shared.below_end[(slot & 1) ^ 1])) {
          ended = true;
          if (slot + 2 + LANE_ROWS < slots) slots = slot + 2 + LANE_ROWS;
        }
        if (ended || behind == chunks - 1) {
          if (mass_tile == NOWHERE) tell_mass();
          warp_barrier();
          if (has_neighbours && lane == 0) store_release(end_of(p, row, walk_index), (u32)chunk);
        }
      }
      if (lane == 0) {
        shared.mass_tile[chunk & 1] = mass_tile;
        shared.turn[chunk & 1].last = course.visits_all ? chunk > course.last_tile_above : !sent;
        shared.more[place_of_slot(course, slot)] = slot + 1 < slots;
      }
      block_barrier();
      if (slot + 1 >= slots) break;
    }
  } else if (role == COSTS) {  // tiles from right to left, as many ahead of recompute as its first checkpoint needs
    const i32 thread = own_thread();
    // The slots before the first, in which the others wait, make what recompute will find there.
    const StripOfCosts s = course.strip;
    CostMaker maker = open_costs(p, s, shared.frame, COST_BARRIER, course.last_tile, thread);
    // In slot t the tile is course.needed - 1 - t.
    for (i32 tile = course.last_tile >= course.needed ? course.last_tile : course.needed;; tile--) {
      if (touches(course.strip, tile))
        make_costs(maker, p, s, shared.frame, shared.making, shared.costs, COST_CHUNKS, tile, tile > first_tile(course.strip) ? tile - 1 : -1,
                   COSTS_ANEW ? afresh(thread) : thread);
      if (tile > course.needed) {
        group_barrier(COST_BARRIER, GROUP);
        continue;
      }
      block_barrier();
      if (tile < course.needed && !shared.more[place_of_slot(course, course.needed - 1 - tile)]) break;
    }
  } else if (role == GRAD_X) {
    const i32 thread = own_thread();
    const Strip s = course.strip;
    GradX maker = open_grad_x(p, s, shared.frame, shared.grads, course.last_tile, thread);
    block_barrier();
    bool begun = false;
    // In slot t the tile is top_chunk + CHUNKS_PER_CHECKPOINT + 1 - t.
    for (i32 tile = course.top_chunk + CHUNKS_PER_CHECKPOINT + 1;; tile--) {
      if (shared.visit[tile & 1]) {
#if MODE == 0
        write_alignment(p, s, shared.align, tile, gradient_of_value(p, s.pair), 0, thread);
#elif MODE == 1
        make_grad_x(maker, p, s, shared.grads, shared.align, tile, thread);
#else
        make_grad_x(maker, p, s, shared.frame, shared.grads, shared.align, tile, !begun,
                    GRAD_X_ANEW ? own_thread() : thread);
#endif
        begun = true;
      } else if (!begun && tile <= course.last_tile && tile > first_tile(course.strip)) {
        look_ahead(maker, p, course.strip, shared.frame, tile - 1, own_thread());
      }
      block_barrier();
      if (!shared.more[place_of_tile(course, tile)]) break;
    }
#if MODE != 0
    leave_sums(maker, shared.grads, closing, own_thread());
#endif
  } else if (role == GRAD_Y) {
    const i32 thread = own_thread();
    const StripOfGy s = course.strip;
    const float factor = gradient_of_value(p, s.pair);
#if MODE == 3
    GradY maker = open_grad_y(p, s, thread);
#endif
    block_barrier();
    // In slot t the tile is top_chunk + CHUNKS_PER_CHECKPOINT + 1 - t.
    for (i32 tile = course.top_chunk + CHUNKS_PER_CHECKPOINT + 1;; tile--) {
      if (shared.visit[tile & 1]) {
        const TurnOfGy turn = shared.turn[tile & 1];
#if MODE == 0
        write_alignment(p, s, shared.align, tile, factor, 1, thread);
#elif MODE == 1
        make_grad_y(p, s, turn, shared.grads, shared.align, tile, factor, thread);
#else
        make_grad_y(maker, p, s, turn, shared.frame, shared.grads, shared.align, tile, factor, thread);
#endif
      }
      block_barrier();
      if (!shared.more[place_of_tile(course, tile)]) break;
    }
  } else if (role == PORTER) {
    const i32 lane = own_lane();
    const Strip& s = course.strip;
    u32* turns = p.turns + (i64)s.pair * p.tiles;
    const u32* end_below = end_of(p, handoff_row(p, s.pair), course.walk_index - 1);
    const bool takes_turns = MODE != 0 && p.grad_y;
    bool at_work = false, next = false;  // whether gradients work on a tile in this slot; in the next
    block_barrier();
    for (i32 slot = 0;; slot++) {
      // Gradients work on `tile` in this slot, on tile + 1 in the one before, on tile - 1 in the next.
      const i32 tile = course.top_chunk - (slot - CHUNKS_PER_CHECKPOINT) + 1;
      if (lane == 0) {
        if (takes_turns && at_work && s.index > 0) store_release(&turns[tile + 1], (u32)course.walk_index);
        at_work = next;
        next = slot >= CHUNKS_PER_CHECKPOINT && touches(s, tile - 1) && tile - 1 <= shared.mass_tile[tile & 1];
        bool first = true;
        if (takes_turns && next && tile - 1 >= course.first_tile_below && tile - 1 <= course.last_tile_below)
          for (;;) {
            first = load_acquire(&turns[tile - 1]) != (u32)(course.walk_index - 1);
            if (!first) break;
            const i32 end = peek_end(end_below);
            if (end != NOWHERE && tile - 1 < end - LANE_ROWS) break;  // the strip below did not come to this tile
            wait_a_little();
          }
        shared.visit[(tile - 1) & 1] = next;
        shared.turn[(tile - 1) & 1].first = first;
        if (at_work) shared.below_end[slot & 1] = s.is_last ? NOWHERE : peek_end(end_below);
      }
      block_barrier();
      if (!shared.more[place_of_slot(course, slot)]) {
        if (lane == 0 && takes_turns && at_work && s.index > 0) store_release(&turns[tile], (u32)course.walk_index);
        break;
      }
    }
  } else {
    block_barrier();
    for (i32 slot = 0;; slot++) {
      block_barrier();
      if (!shared.more[place_of_slot(course, slot)]) break;
    }
  }
#if MODE != 0
  if (!p.grad_x) return;
  block_barrier();
  close_grad_x<BACKWARD_THREADS>(p, course.strip, shared.frame, shared.grads, closing);
#endif
}
#if HAS_BACKWARD
KERNEL THREADS_PER_BLOCK(BACKWARD_THREADS, 1) tiled_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  backward_pass<false>(p, *(BackwardShared*)memory);
}
#endif

#if HAS_AT_ONCE && MODE != 0 && !SLICED
// Both passes in one launch, for pairs of one strip. No block waits for another.
static_assert(sizeof(ForwardShared) <= BACKWARD_SHARED, "the passes share their memory");
KERNEL THREADS_PER_BLOCK(BACKWARD_THREADS, 1) tiled_at_once(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  if (thread_index() == 0) prepare_redo(p, (i32)block_index());
  forward_pass<BACKWARD_THREADS, true>(p, *(ForwardShared*)memory);
  block_barrier();
  backward_pass<true>(p, *(BackwardShared*)memory);
}
#endif
