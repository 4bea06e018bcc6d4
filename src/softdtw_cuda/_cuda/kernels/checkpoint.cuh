// Checkpoints: a walker's state in memory, and the saved bottom row of each strip.
#pragma once

#if PACKED
// Four cells of a lane in 22 bytes instead of 32: the exponent of one and what the others have more, each difference
// partly in the word of its cell's fraction and partly elsewhere. A renormalised f has 23 bits to keep.
//   near  f 23 bits, differences from the first cell 17: nothing is lost
//   far   differences from the lowest exponent, 23 bits beside 17 of f, or where that is not enough 30 beside 10; the cell
//         with the lowest keeps 19. Exponents that far apart are sums of scaled costs so large that float32 has
//         rounded them by as much, as a rule, and of two cells 2^23 apart the lesser is hardly ever on a path.
// Next to forbidden cells the first may have no path where others have one: it then stands in with their lowest exponent.
static_assert(LANE_ROWS == 2 && !WIDE, "four cells to a lane");
#define NO_PATH_FROM (5 << 27)  // flagged walks end at 2^29; no path gets above that and back by 2^27
#define EXPONENT_BIAS (1 << 27)
#define EXPONENT_MASK 0x3fffffffu
#define NEAR_BIAS 65536
#define NEAR_NO_PATH 0x1ffffu
#define FAR_NO_PATH 0x3fffffffu
struct SavedStates {
  Word4 cells[32];
  u32 exponents[32];  // n of the cell that the others are compared with, in bit 30 whether they are far, in bit 31 whether
                      // the first has no path, and that exponent is the lowest of the others
  u16 rest[32];
};
DEVICE void swap(Scaled& a, Scaled& b) {
  Scaled c = a;
  a = b;
  b = c;
}
// Brings the lowest exponent to the front; returns what `restore_order` needs.
DEVICE u32 lowest_first(Scaled (&z)[4]) {
  u32 swapped = 0;
  if (min_of3(z[2].n, z[3].n, z[3].n) < min_of3(z[0].n, z[1].n, z[1].n)) { swap(z[0], z[2]); swap(z[1], z[3]); swapped = 2; }
  if (z[1].n < z[0].n) { swap(z[0], z[1]); swapped |= 1; }
  return swapped;
}
DEVICE void restore_order(Scaled (&z)[4], u32 swapped) {
  if (swapped & 1) swap(z[0], z[1]);
  if (swapped & 2) { swap(z[0], z[2]); swap(z[1], z[3]); }
}
// far: of this lane; where no lane's cells are, a warp takes the shorter code, which FAR_POSSIBLE = false leaves.
template <bool FAR_POSSIBLE>
DEVICE void pack_cells(SavedStates* to, Scaled (&z)[4], bool far, bool headless) {
  far = FAR_POSSIBLE && far;
  const u32 swapped = far ? lowest_first(z) : 0;
  u32 words[4], elsewhere[4], wider = 0;
  UNROLL for (int i = 0; i < 4; i++) {
    const u32 fraction = bits_of(z[i].f) & 0x7fffffu;
    const bool nowhere = z[i].n >= NO_PATH_FROM;
    if (i == 0) {
      words[0] = far ? fraction >> 4 << 13 : fraction << 9;
    } else if (far) {
      const u32 difference = nowhere ? FAR_NO_PATH : (u32)(z[i].n - z[0].n);
      const u32 bits = difference >> 23 ? 30u : 23u, kept = fraction >> (bits - 17u);
      words[i] = kept << bits | difference;
      elsewhere[i] = kept >> (32u - bits);
      if (bits == 30u) wider |= 1u << (i - 1);
    } else {
      const u32 difference = nowhere ? NEAR_NO_PATH : (u32)(z[i].n - z[0].n + NEAR_BIAS);
      words[i] = fraction << 9 | (difference & 511u);
      elsewhere[i] = difference >> 9;
    }
  }
  words[0] |= far ? elsewhere[3] << 5 | swapped << 3 | wider : elsewhere[3];
  to->cells[lane_index()] = Word4{words[0], words[1], words[2], words[3]};
  to->exponents[lane_index()] = (z[0].n < NO_PATH_FROM ? (u32)(z[0].n + EXPONENT_BIAS) : EXPONENT_MASK) | (far ? 1u << 30 : 0u) |
                                (headless ? 1u << 31 : 0u);
  to->rest[lane_index()] = (u16)(elsewhere[1] | elsewhere[2] << 8);
}
// A lane's part of a checkpoint as it is in memory, so that it can be loaded long before it is unpacked.
struct FetchedWalker { Word4 v; u32 exponents, rest; };
template <bool FAR_POSSIBLE>
DEVICE void unpack_cells(Scaled (&z)[4], const FetchedWalker& packed) {
  const Word4& v = packed.v;
  const u32 exponents = packed.exponents, rest = packed.rest;
  const bool far = FAR_POSSIBLE && (exponents >> 30 & 1u);
  const u32 words[4] = {v.a, v.b, v.c, v.d};
  const u32 elsewhere[4] = {0, rest & 255u, rest >> 8, (far ? v.a >> 5 : v.a) & 255u};
  z[0].n = (exponents & EXPONENT_MASK) == EXPONENT_MASK ? NO_PATH : (i32)(exponents & EXPONENT_MASK) - EXPONENT_BIAS;
  UNROLL for (int i = 0; i < 4; i++) {
    u32 fraction;
    if (i == 0) {
      fraction = far ? words[0] >> 13 << 4 | 8u : words[0] >> 9;  // the middle of what was cut off
    } else if (far) {
      const u32 bits = v.a >> (i - 1) & 1u ? 30u : 23u;
      const u32 difference = words[i] & ((1u << bits) - 1u);
      fraction = (words[i] >> bits | elsewhere[i] << (32u - bits)) << (bits - 17u) | 1u << (bits - 18u);
      z[i].n = difference == FAR_NO_PATH ? NO_PATH : z[0].n + (i32)difference;
    } else {
      const u32 difference = (words[i] & 511u) | elsewhere[i] << 9;
      fraction = words[i] >> 9;
      z[i].n = difference == NEAR_NO_PATH ? NO_PATH : z[0].n + (i32)difference - NEAR_BIAS;
    }
    z[i].f = float_of(fraction | 0x3f800000u);
  }
  if (far) restore_order(z, v.a >> 3);
  if (BANDED && exponents >> 31) z[0].n = NO_PATH;
}
DEVICE void store_walker(SavedStates* to, const Walker& w) {
  Scaled z[4] = {w.current[0], w.current[1], w.previous[0], w.above};
  const bool headless = BANDED && z[0].n >= NO_PATH_FROM;
  if (headless) z[0].n = min_of3(z[1].n, z[2].n, z[3].n);
  u32 away = 0;  // at least the largest difference
  UNROLL for (int i = 1; i < 4; i++) {
    const i32 difference = z[i].n - z[0].n;
    if (z[i].n < NO_PATH_FROM) away |= (u32)(difference < 0 ? -difference : difference);
  }
  const bool far = away >= NEAR_BIAS - 1;
  if (any_lane(far)) pack_cells<true>(to, z, far, headless);
  else pack_cells<false>(to, z, far, headless);
}
DEVICE FetchedWalker fetch_walker(const SavedStates* from) {
  return FetchedWalker{from->cells[lane_index()], from->exponents[lane_index()], from->rest[lane_index()]};
}
DEVICE Walker unpacked(const FetchedWalker& packed) {
  Scaled z[4];
  if (any_lane(packed.exponents >> 30 & 1u)) unpack_cells<true>(z, packed);
  else unpack_cells<false>(z, packed);
  Walker w = fresh_walker();
  w.current[0] = z[0];
  w.current[1] = z[1];
  w.previous[0] = z[2];
  w.above = z[3];
  return w;
}
#else
#define STATE_SLOTS (2 * LANE_ROWS)
struct SavedStates { StoredState slots[STATE_SLOTS * 32]; };
DEVICE void store_walker(SavedStates* to, const Walker& w) {
  StoredState* slots = to->slots;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) slots[q * 32 + lane_index()] = StoredState{w.current[q].f, w.current[q].n};
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++)
    slots[(LANE_ROWS + q) * 32 + lane_index()] = StoredState{w.previous[q].f, w.previous[q].n};
  slots[(2 * LANE_ROWS - 1) * 32 + lane_index()] = StoredState{w.above.f, w.above.n};
}
typedef Walker FetchedWalker;
DEVICE Walker unpacked(const FetchedWalker& w) { return w; }
DEVICE FetchedWalker fetch_walker(const SavedStates* from) {
  const StoredState* slots = from->slots;
  Walker w = fresh_walker();
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    StoredState v = slots[q * 32 + lane_index()];
    w.current[q] = Scaled{v.f, v.n};
  }
  UNROLL for (int q = 0; q < LANE_ROWS - 1; q++) {
    StoredState v = slots[(LANE_ROWS + q) * 32 + lane_index()];
    w.previous[q] = Scaled{v.f, v.n};
  }
  StoredState v = slots[(2 * LANE_ROWS - 1) * 32 + lane_index()];
  w.above = Scaled{v.f, v.n};
  return w;
}
#endif
// Checkpoints and bottom rows are kept from the band's first column on. A strip's first checkpoint is where its walk
// starts, so it is known and not kept.
DEVICE i32 first_checkpoint(const Strip& s) { return s.first_column / CHECKPOINT; }
DEVICE Walker first_walker(const Strip& s) {
  Walker w = fresh_walker();
  if (s.index == 0 && lane_index() == 0) w.above = one();
  return w;
}
DEVICE SavedStates* saved_state(const Params& p, const Strip& s, i32 checkpoint) {
  SavedStates* states = (SavedStates*)(p.states + s.pair * p.pair_bytes);
  return states + ((i64)s.index * p.checkpoints + checkpoint - first_checkpoint(s) - 1);
}
DEVICE void save_checkpoint(const Params& p, const Strip& s, i32 checkpoint, const Walker& w) {
  if (p.save && checkpoint > first_checkpoint(s)) store_walker(saved_state(p, s, checkpoint), w);
}
DEVICE FetchedWalker fetch_checkpoint(const Params& p, const Strip& s, i32 checkpoint) {
  return checkpoint > first_checkpoint(s) ? fetch_walker(saved_state(p, s, checkpoint)) : FetchedWalker{};
}
DEVICE Walker walker_of(const FetchedWalker& kept, const Strip& s, i32 checkpoint) {
  return checkpoint > first_checkpoint(s) ? unpacked(kept) : first_walker(s);
}
DEVICE Walker load_checkpoint(const Params& p, const Strip& s, i32 checkpoint) {
  return walker_of(fetch_checkpoint(p, s, checkpoint), s, checkpoint);
}
// Strip `index`'s bottom row, to be indexed by column.
DEVICE StoredState* saved_bound(const Params& p, const Strip& s, i32 index) {
  i32 first = (index + 1) * STRIP_ROWS - 1 - s.bandwidth;
  return (StoredState*)(p.bounds + s.pair * p.pair_bytes) + (i64)index * p.bound_columns - (first > 0 ? first : 0);
}
