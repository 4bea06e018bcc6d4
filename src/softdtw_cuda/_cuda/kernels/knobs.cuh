// Choices that depend on the architecture or on what the compiler does with registers, all in one place.
//
// They were made with NVRTC 13.0 for sm_90 and sm_100: tests/cuda/test_nvrtc.py shows that no kernel spills, and
// docs/kernels.md ("Registers", "Tried, and slower") has the times. None of them changes a result.
//
//   knob                                where                            effect
//   SPILLS_EASILY                       sm_100 and later                 the compiler keeps so much in registers there that
//                                                                        it spills where for older cards it does not
//   KEEP_X                              tensor, DIMS <= 64               x of the strip in registers, as fragments
//   FETCHES_X_EARLY                     tensor, DIMS <= 64               registers hold x while the rows are measured; not those
//                                                                        of float16 that is read element by element
//   PREFETCHES_Y                        tensor                           gX has registers for y of the next tile or slice
//   COST_ADDRESSES_RECOMPUTED           tensor, as below                 helpers compute addresses for every tile instead of
//                                                                        keeping them in registers that then spill. It takes
//                                                                        instructions, so only where it must be; sliced
//                                                                        costs are quicker by it
//   FORWARD_COST_ADDRESSES_RECOMPUTED   tensor, DIMS 64, band            the same, in the forward
//   GRAD_X_ADDRESSES_RECOMPUTED         tensor, DIMS > 64, sm_100        the same, for gX
//   GRAD_X_PLANE_BY_PLANE               the same, float32                products with one plane of y at a time, the first
//                                                                        of which is read twice: fewer registers
//   GRAD_X_HALVES_UNROLLED              tensor, DIMS > 64, float32       unrolled by 2 the compiler keeps fewer addresses
//   *_COPY_STRIP, GRAD_Y_COPY_ORDER     tiled                            whether a role copies the strip, or its order, from
//                                                                        shared memory to registers; where there are none to
//                                                                        spare it reads them as it goes
//   UNIVARIATE_FORWARD_BLOCKS           D = 1                            20: five warps to a scheduler; for sm_100 that would
//                                                                        leave too few registers
//   PAIR_STEPS                          one warp per pair                steps that are unrolled; more take more registers
//                                                                        than they gain. Forward + backward on an H200, 16384
//                                                                        pairs of 128 steps, 2, 4 and 8 of them: D = 2 182,
//                                                                        189, 192 Gcells/s; D = 8 109, 112, 109; D = 16 65,
//                                                                        67, 45 (D > 4 with plain sums of the distance)
//   WIDE_FORWARD_BLOCKS                 wide                             8: the costs of eight steps need 200 registers
//   PAIR_FORWARD_BLOCKS, PAIR_BACKWARD_BLOCKS                            others from 8 to 24 and from 6 to 12 were within
//                                                                        3 %, or spilled
//   MATRIX_FORWARD_BLOCKS, MATRIX_BACKWARD_BLOCKS                        registers for half of the next chunk's costs; those of
//                                                                        sm_80 spill with 9 to 12, three to a quarter of
//                                                                        a processor
#pragma once

#define SPILLS_EASILY (__CUDA_ARCH__ >= 1000)

#if SPILLS_EASILY
#define UNIVARIATE_FORWARD_BLOCKS 16
#else
#define UNIVARIATE_FORWARD_BLOCKS 20
#endif
#define UNIVARIATE_BACKWARD_BLOCKS 4
#define PAIR_FORWARD_BLOCKS 16
#define PAIR_BACKWARD_BLOCKS 8
#if __CUDA_ARCH__ >= 900
#define MATRIX_FORWARD_BLOCKS 12
#define MATRIX_BACKWARD_BLOCKS 12
#else
#define MATRIX_FORWARD_BLOCKS 8
#define MATRIX_BACKWARD_BLOCKS 8
#endif
#define WIDE_FORWARD_BLOCKS 8
#define WIDE_BACKWARD_BLOCKS 4
#define WIDE_RERUN_BLOCKS 2

#ifdef DIMS
#define PAIR_STEPS (DIMS <= 4 ? 8 : 4)
#endif
#ifdef TILED
#define IS_TENSOR (MODE == TENSOR)
#define KEEP_X (DIMS <= 64 && !SLICED)
#define FETCHES_X_EARLY (DIMS <= 64 && !(DIMS == 64 && INPUT == FLOAT16 && FIT == ANY_ROWS))
#define PREFETCHES_Y (SLICED || DIMS * (INPUT == FLOAT32 ? 2 : 1) <= 64)
#define COST_ADDRESSES_RECOMPUTED \
  (IS_TENSOR && (SLICED || (INPUT == FLOAT32 && (DIMS > 64 || (DIMS == 64 && BANDED && FIT < WHOLE_SLICES)))))
#define FORWARD_COST_ADDRESSES_RECOMPUTED \
  (IS_TENSOR && DIMS == 64 && BANDED && \
   (SPILLS_EASILY ? INPUT == FLOAT32 && LANE_ROWS == 2 : !(INPUT == FLOAT16 && LANE_ROWS == 1 && FIT == ANY_ROWS)))
#define FORWARD_COSTS_COPY_STRIP (!(FORWARD_COST_ADDRESSES_RECOMPUTED && INPUT == FLOAT32 && LANE_ROWS == 2))
#define GRAD_X_ADDRESSES_RECOMPUTED (IS_TENSOR && DIMS > 64 && SPILLS_EASILY)
#define GRAD_X_PLANE_BY_PLANE (GRAD_X_ADDRESSES_RECOMPUTED && INPUT == FLOAT32)
#if DIMS > 64 && INPUT == FLOAT32 && !SPILLS_EASILY
#define GRAD_X_HALVES_UNROLLED 2
#else
#define GRAD_X_HALVES_UNROLLED 1
#endif
#define COSTS_COPY_STRIP (!COST_ADDRESSES_RECOMPUTED)
#define GRAD_Y_COPY_STRIP \
  (!(SLICED || (DIMS > 64 && SPILLS_EASILY && (INPUT == FLOAT32 || (INPUT == BFLOAT16 && FIT < WHOLE_SLICES)))))
#define GRAD_Y_COPY_ORDER (!(SLICED || SPILLS_EASILY || (INPUT == BFLOAT16 && DIMS == 64 && FIT < WHOLE_SLICES)))
#endif

// A type, or a reference to it, as a knob decides.
template <class T, bool COPY> struct CopyOrReference { typedef T type; };
template <class T> struct CopyOrReference<T, false> { typedef const T& type; };
