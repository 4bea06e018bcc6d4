// The hand-off of a row from one strip to the next; handoff.cuh has the protocol and why it is safe. A word is as many
// 8-byte parts as its numbers take, each with the number of the strip that wrote it.
#pragma once

#define REAL_WORDS ((i32)(sizeof(real) / 4))
#define STATE_PARTS ((3 * REAL_WORDS + 2 + 1) / 2)  // f, V, the derivative of R; n
#define FLOW_PARTS REAL_WORDS                       // E and its derivative

template <int PARTS> struct RowWord { u32 half[2 * PARTS]; bool there; };
template <int PARTS> DEVICE RowWord<PARTS> load_word(const Word4* row, i32 column, u32 owner) {
  RowWord<PARTS> w;
  w.there = true;
  UNROLL for (int i = 0; i < PARTS; i++) {
    const Word4 v = load_relaxed(row + (i64)column * STATE_PARTS + i);
    w.half[2 * i] = v.a;
    w.half[2 * i + 1] = v.c;
    w.there &= v.b == owner && v.d == owner;
  }
  return w;
}
template <int PARTS> DEVICE void store_word(Word4* row, i32 column, u32 owner, const RowWord<PARTS>& w) {
  UNROLL for (int i = 0; i < PARTS; i++)
    store_relaxed(row + (i64)column * STATE_PARTS + i, Word4{w.half[2 * i], owner, w.half[2 * i + 1], owner});
}
template <int PARTS> DEVICE RowWord<PARTS> await_word(const Word4* row, i32 column, u32 owner, const Waiter& waiter) {
  Poll poll(waiter, (i32)owner, column);
  RowWord<PARTS> w = load_word<PARTS>(row, column, owner);
  while (!w.there) {
    poll.failed();
    w = load_word<PARTS>(row, column, owner);
  }
  return w;
}
DEVICE void put(u32* half, float v) { half[0] = bits_of(v); }
DEVICE void put(u32* half, double v) { half[0] = (u32)bits_of(v); half[1] = (u32)(bits_of(v) >> 32); }
DEVICE real get(const u32* half) {
#if INPUT == FLOAT64
  return double_of((u64)half[1] << 32 | half[0]);
#else
  return float_of(half[0]);
#endif
}

// A row above a strip, at one column: what the forward hands down.
struct Above { Scaled z; real v, total; };
DEVICE RowWord<STATE_PARTS> pack_state(const Above& above) {
  RowWord<STATE_PARTS> w{};
  w.half[0] = (u32)(u64)above.z.n;
  w.half[1] = (u32)((u64)above.z.n >> 32);
  put(w.half + 2, above.z.f);
  put(w.half + 2 + REAL_WORDS, above.v);
  put(w.half + 2 + 2 * REAL_WORDS, above.total);
  return w;
}
DEVICE Above unpack_state(const RowWord<STATE_PARTS>& w) {
  return Above{Scaled{get(w.half + 2), (i64)((u64)w.half[1] << 32 | w.half[0])}, get(w.half + 2 + REAL_WORDS), get(w.half + 2 + 2 * REAL_WORDS)};
}
DEVICE Above nothing_above() { return Above{no_path(), (real)0, (real)0}; }

// What the backward hands up: the first and the last term of (8), added by the row that sends them, and the same of (11).
struct Flow { real e, slope; };
DEVICE RowWord<FLOW_PARTS> pack_flow(const Flow& flow) {
  RowWord<FLOW_PARTS> w{};
  put(w.half, flow.e);
  put(w.half + REAL_WORDS, flow.slope);
  return w;
}
DEVICE Flow unpack_flow(const RowWord<FLOW_PARTS>& w) { return Flow{get(w.half), get(w.half + REAL_WORDS)}; }
// Whether `row` has anything to pass up at this column: from its cell there, or by the diagonal from the next.
DEVICE bool passes_up(const Strip& s, i32 row, i32 column) {
  return column >= 0 && (in_band(s, row, column) || in_band(s, row, column + 1));
}
DEVICE Word4* handoff_row(const Params& p, i32 pair) { return (Word4*)(p.rows + pair * p.row_bytes); }
