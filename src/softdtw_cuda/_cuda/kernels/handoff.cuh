// The hand-off of a row from one strip to the next.
//
// Strip k passes one row to the next strip in the order of the walk (downwards in the forward, upwards in the
// backward) through its pair's row buffer. Each word carries k, so a reader can tell whose it is; the buffer starts as
// all ones, which is no strip. No fence is needed: each half of a word carries k beside what it vouches for, a half is
// one indivisible 8-byte access however the compiler arranges it, and nothing else is read on the strength of it.
//
// Why a word is not overwritten before it is read: strip k's word has one reader, strip k + 1, and the next to store
// there is that same strip, STRIP_ROWS - 1 steps after the step that needed the word. A band does not change that:
// whether a column's word is stored and whether it is read is decided by the same predicate (in_band of the upper
// strip's last row, passes_up of the lower strip's first), so a strip has read whatever the one before it stored
// where it stores itself. (In the backward one word may be read by nobody, at the band's right edge; nobody stores there
// again either.)
//
// Why it cannot hang: strips are handed out by a ticket in the order of the walk, so the strip being waited for holds
// an earlier ticket and is running or done; the first strip of a pair waits for nobody; a reader waits only for columns
// that the band makes its neighbour write. By induction every word that is polled gets written. k is a field of its
// own, so no input, NaN included, can forge or hide it.
#pragma once

#if WIDE
struct RowWord { Word4 first, second; };
struct HandoffRow { Word4 *first, *second; };
DEVICE u64 join(u32 low, u32 high) { return ((u64)high << 32) | low; }
DEVICE Word4 pack_half(u64 v, u32 owner) { return Word4{(u32)v, owner, (u32)(v >> 32), owner}; }
DEVICE u64 unpack_half(const Word4& w) { return join(w.a, w.c); }
DEVICE RowWord pack(u64 a, u64 b, u32 owner) { return RowWord{pack_half(a, owner), pack_half(b, owner)}; }
DEVICE bool is_from(const Word4& w, u32 owner) { return w.b == owner && w.d == owner; }
DEVICE bool is_from(const RowWord& w, u32 owner) { return is_from(w.first, owner) && is_from(w.second, owner); }
DEVICE RowWord pack_state(const Scaled& z, u32 owner) { return pack(bits_of(z.f), (u64)z.n, owner); }
DEVICE Scaled unpack_state(const RowWord& w) { return Scaled{double_of(unpack_half(w.first)), (i64)unpack_half(w.second)}; }
DEVICE RowWord load_word(const HandoffRow& row, i32 column) {
  return RowWord{load_relaxed(row.first + column), load_relaxed(row.second + column)};
}
DEVICE void store_word(const HandoffRow& row, i32 column, const RowWord& w) {
  store_relaxed(row.first + column, w.first);
  store_relaxed(row.second + column, w.second);
}
#else
typedef Word4 RowWord;
struct HandoffRow { Word4* first; };
DEVICE RowWord pack(u32 a, u32 b, u32 owner) { return RowWord{a, owner, b, owner}; }
DEVICE bool is_from(const RowWord& w, u32 owner) { return w.b == owner && w.d == owner; }
DEVICE RowWord pack_state(const Scaled& z, u32 owner) { return pack(bits_of(z.f), (u32)z.n, owner); }
DEVICE Scaled unpack_state(const RowWord& w) { return Scaled{float_of(w.a), (i32)w.c}; }
DEVICE RowWord load_word(const HandoffRow& row, i32 column) { return load_relaxed(row.first + column); }
DEVICE void store_word(const HandoffRow& row, i32 column, const RowWord& w) { store_relaxed(row.first + column, w); }
#endif

// What passes from a row to the one above it in the backward, per column: the first and the last term of (8), added by
// the row that sends them (its up at this column, its diagonal at the next), and for univariate series the gradient of
// y so far.
struct alignas(2 * sizeof(real)) Flow { real pass, y; };
#if WIDE
DEVICE RowWord pack_flow(const Flow& f, u32 owner) { return pack(bits_of(f.pass), 0ull, owner); }
DEVICE Flow unpack_flow(const RowWord& w) { return Flow{double_of(unpack_half(w.first)), 0.0}; }
#else
DEVICE RowWord pack_flow(const Flow& f, u32 owner) { return pack(bits_of(f.pass), bits_of(f.y), owner); }
DEVICE Flow unpack_flow(const RowWord& w) { return Flow{float_of(w.a), float_of(w.c)}; }
#endif
// Whether `row` has anything to pass up at this column: from its cell there, or by the diagonal from the next.
DEVICE bool passes_up(const Strip& s, i32 row, i32 column) {
  return column >= 0 && (in_band(s, row, column) || in_band(s, row, column + 1));
}

DEVICE HandoffRow handoff_row(const Params& p, i32 pair) {
  HandoffRow row;
  row.first = (Word4*)(p.rows + pair * p.row_bytes);
#if WIDE
  row.second = (Word4*)(p.more_rows + pair * p.more_row_bytes);
#endif
  return row;
}
DEVICE RowWord await_word(const HandoffRow& row, i32 column, u32 owner, const Waiter& waiter) {
  Poll poll(waiter, (i32)owner, column);
  RowWord w = load_word(row, column);
  while (!is_from(w, owner)) {
    poll.failed();
    w = load_word(row, column);
  }
  return w;
}
