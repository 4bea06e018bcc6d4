// Build-time constants, by name. kernel.py passes the numbers; the sources use the names.
//
//   MODE       where costs come from
//   INPUT      type of x, y or the cost matrix
//   FIT        how rows of features can be read (tensor cores only)
//   PART       the one kernel of the source that is wanted, so that several compilers can work side by side
//   WIDE       set by the source: 0: f float, n 32 bits; enough while every |s| < 2^21 and the path's sum of s stays
//              below 2^29. 1: f double, n 64 bits; for float64 and for the pairs that the narrow kernels flag.
//   LANE_ROWS  rows per lane; a strip is 32 * LANE_ROWS rows
//   BANDED     1 when cells can be forbidden (Sakoe-Chiba band, infinite costs)
#pragma once

// MODE
#define COST_MATRIX 0  // a given matrix (B, N, M)
#define DIRECT 1       // squared Euclidean distances by differences
#define UNIVARIATE 2   // the same for D = 1
#define TENSOR 3       // the same by a matrix product on tensor cores

// INPUT
#define FLOAT32 0
#define FLOAT64 1
#define FLOAT16 2
#define BFLOAT16 3

// FIT
#define ANY_ROWS 0      // element by element
#define WHOLE_QUADS 1   // D is a multiple of four, rows are aligned to 16 bytes
#define WHOLE_SLICES 2  // D is a multiple of DIMS, rows are aligned to 16 bytes

// PART
#define EVERY_PART 0
#define FORWARD_PART 1
#define BACKWARD_PART 2
#define RERUN_PART 3
#define FORWARD_BACKWARD_PART 4
#ifndef PART
#define PART EVERY_PART
#endif
#define HAS_PART(part) (PART == EVERY_PART || PART == part)

#define STRIP_ROWS (32 * LANE_ROWS)

// Build-time answers, to compile a loop body with and without a rare case.
struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };
