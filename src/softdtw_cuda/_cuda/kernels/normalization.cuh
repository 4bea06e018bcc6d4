// The normalization of a strip for tensor cores: a centre to subtract and a power of two to multiply by.
//
// Subtracting a common centre does not change distances, and an offset of the data then costs no digits. Scaling keeps
// fp16 planes in range: the strip's own x, and a sample of y, end up at most 2, which leaves y a factor of 2^15.
#pragma once

#define MOST_CENTRES 1024
struct Normalization {
#if SLICED
  alignas(16) float centre[MOST_CENTRES];       // of as many features as there is room for
#else
  alignas(16) PlaneRow x[PLANES * STRIP_ROWS];  // the strip's rows for the tensor cores
  float centre[DIMS];
#endif
  float x_squares[STRIP_ROWS];
  u32 largest;
  alignas(16) Features y;  // of the pair: nobody needs a register for where it is
};

// float32: the mean of eight of the strip's rows. 16 bits: zero, except (if the features come in one slice) where the data
// sits far from zero, when the difference of two inputs is representable in 16 bits again.
DEVICE float centre_of(const Features& x, const Features& y, const Strip& s, i32 k) {
  if constexpr (SLICED && INPUT != FLOAT32) return 0.0f;
  float v[8], sum = 0.0f;
  UNROLL for (int i = 0; i < 8; i++) {
    i32 row = s.first_row + i * (STRIP_ROWS / 8);
    v[i] = feature(x, row <= s.last_row ? row : s.last_row, k);
  }
  UNROLL for (int i = 0; i < 8; i++) sum += v[i];
  float mean = sum * 0.125f;
  bool finite = mean - mean == 0.0f;
  if constexpr (INPUT == FLOAT32) return finite ? mean : 0.0f;
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
}
DEVICE bool is_scaled(u32 exponent) { return INPUT == FLOAT32 && exponent > 8 && exponent < 250; }
DEVICE float scale_of(const Normalization& normalization) {
  u32 exponent = normalization.largest >> 23;
  return is_scaled(exponent) ? float_of((254u - exponent) << 23) : 1.0f;
}
DEVICE float unscale_of(const Normalization& normalization) {
  u32 exponent = normalization.largest >> 23;
  return is_scaled(exponent) ? float_of(exponent << 23) : 1.0f;
}

#define ROWS_MEASURED (STRIP_ROWS + 8)  // the strip's own, then eight of y from the whole of it
// Row r of those. Past the last of x it is x's last row, so that costs of rows that are not there are in range, too; past the
// last of all it is y's, which is measured already and changes nothing.
DEVICE const element* measured_row(const Features& x, const Features& y, const Strip& s, i32 r) {
  const u32 sample = (u32)(r < ROWS_MEASURED ? r - STRIP_ROWS : 7);
  const i32 row = r < STRIP_ROWS ? s.first_row + r : (i32)(sample * (u32)(s.m - 1) / 7u);
  if (r >= STRIP_ROWS) return y.rows + (i64)row * y.d;
  return x.rows + (i64)(row < x.count ? row : x.count - 1) * x.d;
}
// One warp's part of row r: its lanes' sums of squares and largest values, put together.
DEVICE void measure_row(Normalization& normalization, i32 r, double sum, float largest) {
  UNROLL for (int mask = 16; mask > 0; mask /= 2) {
    sum += from_lane_xor(sum, mask);
    largest = max_of(largest, from_lane_xor(largest, mask));
  }
  if (lane_index() == 0) {
    if (r < STRIP_ROWS) normalization.x_squares[r] = (float)sum;
    raise_to(&normalization.largest, bits_of(largest));
  }
}

#if SLICED
DEVICE float centre_at(const Normalization& normalization, const Features& x, const Features& y, const Strip& s, i32 k) {
  return k < MOST_CENTRES ? normalization.centre[k] : centre_of(x, y, s, k);
}
// Whether a slice's centres are kept; those of later slices are computed for each tile, by set_centre.
DEVICE bool has_centres(i32 slice) { return (slice + 1) * DIMS <= MOST_CENTRES; }
DEVICE void set_centre(float* centre, const Params& p, const Strip& s, i32 slice, i32 thread) {
  Features x = features_x(p, s);
  for (i32 k = thread; k < DIMS; k += GROUP) centre[k] = centre_of(x, features_y(p, s), s, slice * DIMS + k);
}

// By all THREADS threads of a block.
template <int THREADS> DEVICE void make_normalization(Normalization& normalization, const Params& p, const Strip& s) {
  const i32 lane = (i32)lane_index(), warp = (i32)warp_index(), thread = (i32)thread_index();
  constexpr int WARPS = THREADS / 32;
  const Features x = features_x(p, s), y = features_y(p, s);
  if (thread == 0) { normalization.largest = 0u; normalization.y = y; }
  for (i32 k = thread; k < MOST_CENTRES; k += THREADS) normalization.centre[k] = centre_of(x, y, s, k);
  block_barrier();
  for (i32 r = warp; r < ROWS_MEASURED; r += WARPS) {
    const element* row = measured_row(x, y, s, r);
    double sum = 0.0;
    float largest = 0.0f;
    auto measure = [&](float v, float centre) {
      v -= centre;
      largest = max_of(largest, absolute(v));
      sum += (double)v * (double)v;
    };
    i32 k = FIT != ANY_ROWS ? lane * 4 : lane;
    UNROLL_BY(4) for (; k < p.d && k < MOST_CENTRES; k += FIT != ANY_ROWS ? 128 : 32) {
      if constexpr (FIT != ANY_ROWS) {
        const Quad quad = unpack(*(const PackedQuad*)(row + k));
        UNROLL for (int j = 0; j < 4; j++) measure(quad.v[j], normalization.centre[k + j]);
      } else {
        measure(to_float(row[k]), normalization.centre[k]);
      }
    }
    UNROLL_BY(1) for (k = MOST_CENTRES + lane; k < p.d; k += 32) measure(to_float(row[k]), centre_of(x, y, s, k));
    measure_row(normalization, r, sum, largest);
  }
  block_barrier();
}
#else
// By all THREADS threads of a block. Nothing else runs on the multiprocessor meanwhile, so as much is loaded before
// anything is waited for as there are registers for.
template <int THREADS> DEVICE void make_normalization(Normalization& normalization, const Params& p, const Strip& s) {
  const i32 lane = (i32)lane_index(), warp = (i32)warp_index(), thread = (i32)thread_index();
  constexpr int WARPS = THREADS / 32;
  const Features x = features_x(p, s), y = features_y(p, s);
  if (thread == 0) { normalization.largest = 0u; normalization.y = y; }
  constexpr int ROUNDS = (ROWS_MEASURED + WARPS - 1) / WARPS, PER_LANE = DIMS / 32;
  constexpr int TOGETHER = DIMS <= 64 || ROUNDS <= 5 ? ROUNDS : 5;
  OwnRows own;
  if (FETCHES_X_EARLY && thread < GROUP) own = fetch_x(p, s, thread);
  for (i32 k = thread; k < DIMS; k += THREADS) normalization.centre[k] = centre_of(x, y, s, k);
  UNROLL_BY(1) for (int round = 0; round < ROUNDS; round += TOGETHER) {
    element v[TOGETHER][PER_LANE];
    UNROLL for (int i = 0; i < TOGETHER; i++) {
      const element* row = measured_row(x, y, s, warp + (round + i) * WARPS);
      UNROLL for (int j = 0; j < PER_LANE; j++) v[i][j] = row[lane + j * 32 < p.d ? lane + j * 32 : p.d - 1];
    }
    if (round == 0) block_barrier();
    UNROLL for (int i = 0; i < TOGETHER; i++) {
      const i32 r = warp + (round + i) * WARPS;
      double sum = 0.0;
      float largest = 0.0f;
      UNROLL for (int j = 0; j < PER_LANE; j++) {
        float away = lane + j * 32 < p.d ? to_float(v[i][j]) - normalization.centre[lane + j * 32] : 0.0f;
        largest = max_of(largest, absolute(away));
        sum += (double)away * (double)away;
      }
      measure_row(normalization, r, sum, largest);
    }
  }
  block_barrier();
  if (thread < GROUP) {
    if (!FETCHES_X_EARLY) own = fetch_x(p, s, thread);
    const float scale = scale_of(normalization);
    stage_x(normalization.x, own, p.d, shift_of(normalization.centre, scale, thread), scale, 0, thread);
  }
  block_barrier();
}
#endif
