// The schedule of a strip's backward, and how it is pruned.
//
// E, the alignment weight, is next to nothing but for a neighbourhood of the likely paths, and moves up and left only. So a
// strip begins where weight can first come to it and ends when all of it has left; what it does not visit has E = 0.
//
//   begins   where weight first comes to it, or somewhat further right: at the last tile in which the strip below sent weight
//            (p.start_lag 1), or earlier, while that is not known yet, at the last tile in which the strip p.start_lag before
//            it in the walk received weight, so that it makes its costs and walks its first checkpoint while the weight is
//            still on its way. The first p.start_lag strips begin at their last column.
//   visits   for gradients the tiles from the last in which it received weight itself.
//   ends     once its own cells have nothing left to pass on, the strip below has ended, and it has come as far as that.
//
// No weight is missed on the right: weight enters a strip only by the words that the strip below sends. A word of column c is
// received at step c + STRIP_ROWS - 1, in chunk c / 32 + LANE_ROWS at most. Words are sent from right to left, and all to the
// right of the first that is not below LEAST_WEIGHT are nothing to the reader, who compares the same number with the same
// limit. Within a strip weight moves left, so the tile of its first word sent is at or left of that of its first received.
//
// So of the tiles of a strip, neither the first nor the last is right of those of the strip below, and the strips that add
// to one tile of gY are neighbours: the lowest of them stores, the others add.
//
// A strip publishes two words behind the pair's hand-off row: the tile of its first weight, sent or received, as a word of
// the hand-off, and its last chunk, released once all before it is stored. A strip that waits for a word of the row, or for
// its order at gY, also reads the end. Every strip publishes both at last, whatever comes to it, and waits for strips below
// it only, so nobody waits for ever: the tiles between the two are visited, and the columns from the last chunk on are
// stored, each in order. And nobody writes where somebody is still to read: a strip that stores a word has read its
// neighbour's there, or that the neighbour has ended; or, in its first chunks, it is further right than the next strip reads,
// which begins no further right itself.
//
// How far a strip goes beyond its neighbour's end depends on when it reads of it. It changes no bit: what is left to pass on
// is set to zero, ended or not; E = 0 changes no sum; and the first to store a sum of gY stores what adding it to zero would
// have left.
//
// With one row to a lane the weight of a tile is known too late; such strips begin at their last column and visit everything.
#pragma once

#define PRUNES_TILES (LANE_ROWS > 1)

// What a block has to do. Slot t: recompute does chunk t of its order while t < chunks; the sweep is
// CHUNKS_PER_CHECKPOINT slots behind and at chunk `top_chunk - (t - CHUNKS_PER_CHECKPOINT)`; gradients of a tile follow
// the sweep of its first chunk by one. Kept in shared memory, since products need the registers.
struct BackwardSchedule {
  Strip strip;
  i32 first_tile_below, last_tile_below;  // of those that the strip below touches, and may have added to
  i32 last_tile_above;                    // of those that the strip above touches
  i32 walk_index, last_checkpoint, chunks, top_chunk, slots;
  i32 last_tile;    // where it begins
  i32 needed;       // the leftmost tile that recompute needs in its first slot
  bool visits_all;  // that the strip touches, not only from its first weight on
  bool unpruned;    // and does not end before its first column: a pair without a path, or poisoned
};
// `start`: the last chunk in which the strip can have weight.
DEVICE BackwardSchedule schedule_of(const Params& p, const Strip& s, i32 walk_index, i32 start, bool unpruned) {
  BackwardSchedule c;
  const Strip below = strip_at(p, s, s.index + 1), above = strip_at(p, s, s.index - 1);
  c.strip = s;
  c.last_tile_above = s.index == 0 ? -1 : last_tile(above);
  c.visits_all = unpruned || !PRUNES_TILES;
  c.first_tile_below = first_tile(below);
  c.last_tile_below = s.is_last ? -1 : last_tile(below);
  c.walk_index = walk_index;
  c.unpruned = unpruned;
  c.last_checkpoint = start / CHUNKS_PER_CHECKPOINT;
  c.chunks = (c.last_checkpoint - first_checkpoint(s) + 1) * CHUNKS_PER_CHECKPOINT;
  c.top_chunk = (c.last_checkpoint + 1) * CHUNKS_PER_CHECKPOINT - 1;  // the sweep's first
  c.slots = c.chunks + CHUNKS_PER_CHECKPOINT + 1;
  c.last_tile = last_tile(s) < c.top_chunk ? last_tile(s) : c.top_chunk;
  c.needed = c.last_checkpoint * CHUNKS_PER_CHECKPOINT - LANE_ROWS;
  return c;
}
// Whether a strip begins where the strip below sent weight, which is known once weight has crossed that strip: for many pairs,
// before the next strip has a block.
DEVICE bool begins_where_sent(const Params& p) { return p.start_lag == 1; }
// By one thread: waits until it is known where the strip begins.
template <bool ALONE> DEVICE BackwardSchedule await_schedule(const Params& p, const Strip& s) {
  const i32 walk_index = (s.n - 1) / STRIP_ROWS - s.index, from = walk_index - p.start_lag;
  const bool unpruned = !has_path(((const float*)p.value)[s.pair]);
  i32 start = last_step(s) / 32;
  if (PRUNES_TILES && !ALONE && !unpruned && from >= 0) {
    const i32 last = await_begin(p, s, handoff_row(p, s.pair), from) + LANE_ROWS;
    if (last < start) start = last > first_chunk(s) ? last : first_chunk(s);
  }
  return schedule_of(p, s, walk_index, start, unpruned);
}

// Which of two places a slot has: by its number, or by the tile that gradients work on, as takes fewer registers.
DEVICE i32 place_of_slot(const BackwardSchedule& c, i32 slot) { return (SPILLS_EASILY ? c.top_chunk + CHUNKS_PER_CHECKPOINT + 1 - slot : slot) & 1; }
DEVICE i32 place_of_tile(const BackwardSchedule& c, i32 tile) { return (SPILLS_EASILY ? tile : c.top_chunk + CHUNKS_PER_CHECKPOINT + 1 - tile) & 1; }
