// Features as operands of tensor cores: planes of 16 bits, fragments, and products of them.
//
// float32: v = hi + lo / 2048 in two fp16 planes, 22 bits, after scaling by a power of two; what the product of two low
// planes would add is below that. 16-bit inputs are one plane.
#pragma once

#define PLANES (INPUT == FLOAT32 ? 2 : 1)
#define ALIGN_PLANES 2  // of E, in the format of the features
#define ROW_HALVES (DIMS + 8)  // 16-bit words from row to row: keeps ldmatrix free of conflicts
#define K_STEPS (DIMS / 16)
typedef u16 PlaneRow[ROW_HALVES];

#if INPUT == BFLOAT16
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

// How the four warps of a group share the strip's rows: 16 rows to a tile.
#define ROW_TILES (STRIP_ROWS / 16)
#define WARPS_PER_ROW_TILE (4 / ROW_TILES)

// Lane l points ldmatrix at row l % 8 of matrix l / 8: rows 0-7 and 8-15, features 0-7 and 8-15.
DEVICE void load_x_fragment(u32 (&a)[PLANES][4], const PlaneRow* x, i32 k_step, i32 thread) {
  const i32 lane = thread & 31, matrix = lane >> 3, first = (i32)(((u32)thread >> 5) % ROW_TILES) * 16;
  UNROLL for (int plane = 0; plane < PLANES; plane++)
    load_matrices(a[plane], &x[plane * STRIP_ROWS + first + (matrix & 1) * 8 + (lane & 7)][k_step * 16 + (matrix >> 1) * 8]);
}

// c += A B and cross += A_lo B_hi + A_hi B_lo for neighbouring 8-column tiles of B. Neighbouring products belong to
// different accumulators, so none waits for the one before.
template <int TILES, int A_PLANES>
DEVICE void multiply_planes(float (&c)[TILES][4], float (&cross)[TILES][4], const u32 (&a)[A_PLANES][4], const u32 (&b)[PLANES][(TILES + 1) / 2][4]) {
  UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[0], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
  if constexpr (A_PLANES > 1) {
    UNROLL for (int i = 0; i < TILES; i++) mma_input(cross[i], a[1], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
  }
  if constexpr (PLANES > 1) {
    UNROLL for (int i = 0; i < TILES; i++) mma_input(cross[i], a[0], b[PLANES - 1][i / 2][(i & 1) * 2], b[PLANES - 1][i / 2][(i & 1) * 2 + 1]);
  }
}
// The same product in one set of registers, where two would be too many: the small terms first, so that c, which starts
// as zeros, is scaled once.
template <int TILES>
DEVICE void multiply_in_place(float (&c)[TILES][4], const u32 (&a)[2][4], const u32 (&b)[PLANES][(TILES + 1) / 2][4]) {
  UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[1], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
  if constexpr (PLANES > 1) {
    UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[0], b[PLANES - 1][i / 2][(i & 1) * 2], b[PLANES - 1][i / 2][(i & 1) * 2 + 1]);
  }
  UNROLL for (int i = 0; i < TILES; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] *= LOW_PLANE;
  UNROLL for (int i = 0; i < TILES; i++) mma_input(c[i], a[0], b[0][i / 2][(i & 1) * 2], b[0][i / 2][(i & 1) * 2 + 1]);
}
template <int TILES> DEVICE void clear(float (&c)[TILES][4]) {
  UNROLL for (int i = 0; i < TILES; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] = 0.0f;
}
