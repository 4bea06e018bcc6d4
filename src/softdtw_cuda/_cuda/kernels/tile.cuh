// Tiles, chunks and rings of the tiled kernels.
//
// Time goes in slots of 32 steps, a *chunk* of the walk, with one block barrier between slots. A *tile* is STRIP_ROWS rows
// by 32 columns; the tile of columns 32 q and on has its cells in chunks q to q + LANE_ROWS. Costs and alignments are kept
// by [step][row], as the walk reads and writes them: rings of chunks, in which a tile is a parallelogram.
#pragma once

#define CHUNKS_PER_CHECKPOINT (CHECKPOINT / 32)
#define COST_CHUNKS (LANE_ROWS + 2 * CHUNKS_PER_CHECKPOINT)     // chunks in the backward's ring of costs
#define FORWARD_CHUNKS (LANE_ROWS + 2)
#define ALIGN_CHUNKS (LANE_ROWS + 2)
#define SHARE_SLOTS (CHUNKS_PER_CHECKPOINT + 1)
#if MODE == TENSOR
#define STEP_STRIDE (STRIP_ROWS + 4)  // conflict-free for the fragments of a matrix product
#else
#define STEP_STRIDE (STRIP_ROWS + 2)
#endif
#define GROUP 128  // threads of a helper group
#define COST_BARRIER 1
#define GRAD_BARRIER 2
#define FORWARD_COST_BARRIER 3  // where both passes are in one launch, with other warps for this in each

static_assert(LANE_ROWS == 1 || CHECKPOINT > 32, "config.py has no such kernel, and no test");

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

// Clears `count` floats of shared memory, a multiple of four, to `value`; by all THREADS threads of a block.
template <int THREADS> DEVICE void fill_ring(float* ring, i32 count, float value) {
  const u32 bits = bits_of(value);
  for (i32 i = (i32)thread_index(); i < count / 4; i += THREADS) ((Word4*)ring)[i] = Word4{bits, bits, bits, bits};
}
// The cost of a cell that no tile has.
#define BLANK_COST (BANDED ? 2.0f * FORBIDDEN_FROM : 0.0f)

// Writes one scaled cost into the ring and watches its range. What comes from tensor cores can be a little less than zero, by
// rounding, and is taken for zero; much less than that is an overflow, and out of range as NaN is.
DEVICE void put_cost(Step* ring, i32 start, i32 chunks, const Strip& s, i32 row, i32 column_in_tile, i32 tile, float cost, bool& bad) {
  if (BANDED && (!in_band(s, s.first_row + row, tile * 32 + column_in_tile) || s.first_row + row >= s.n)) cost = 2.0f * FORBIDDEN_FROM;
  else bad |= !(absolute(cost) < FORBIDDEN_FROM);
#if MODE == TENSOR
  cost = max_or_nan(cost, 0.0f);
#endif
  ring[ring_step(start, column_in_tile + row, chunks)][row] = cost;
}

// What the walker needs of a tile's costs; see walk().
struct TileSteps {
  const Step* ring;
  const StoredState* above;
  struct Eight { LaneReals cost[8]; StoredState top[8]; };
  METHOD void seek() {}
  METHOD Eight read(i32 first) const {
    Eight ahead;
    UNROLL for (int k = 0; k < 8; k++) ahead.cost[k] = *(const LaneReals*)&ring[first + k][lane_index() * LANE_ROWS];
    UNROLL for (int k = 0; k < 8; k++) ahead.top[k] = above[first + k];
    return ahead;
  }
  METHOD void costs(real (&cost)[LANE_ROWS], const Eight& eight, i32, i32 k) const {
    UNROLL for (int q = 0; q < LANE_ROWS; q++) cost[q] = eight.cost[k].row[q];
  }
  METHOD const StoredState& top(const Eight& eight, i32, i32 k) const { return eight.top[k]; }
};
