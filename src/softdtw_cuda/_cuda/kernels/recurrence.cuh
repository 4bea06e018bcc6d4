// What every kernel shares: the arguments, the scaled numbers of eqs. (5, 6, 7), the geometry of strips and bands,
// and the hand-off of a row from one strip to the next.
//
// Build-time choices
//   WIDE       0: f float, n 32 bits; enough while every |s| < 2^21 and the path's sum of s stays below 2^29.
//              1: f double, n 64 bits; for float64 and for the samples that the narrow kernels flag.
//   INPUT      0 float32, 1 float64, 2 float16, 3 bfloat16
//   LANE_ROWS  rows per lane; a strip is 32 * LANE_ROWS rows
//   BANDED     1 when cells can be forbidden (Sakoe-Chiba band, infinite costs)
//   PART       the one kernel of the source that is wanted, so that several compilers can work side by side; 0 for all
#pragma once
#ifndef PART
#define PART 0
#endif
#define HAS_FORWARD (PART == 0 || PART == 1)
#define HAS_BACKWARD (PART == 0 || PART == 2)
#define HAS_REDO (PART == 0 || PART == 3)
#define HAS_AT_ONCE (PART == 0 || PART == 4)

#define STRIP_ROWS (32 * LANE_ROWS)

struct Params {
  const void* x;            // (B, N, D), or the cost matrix (B, N, M)
  const void* y;            // (B, M, D)
  const i32* x_lengths;     // (B,) or null
  const i32* y_lengths;
  const void* grad;         // (B,) gradient of the value; null for `weight`, and then a second walk finds the value too
  void* value;              // (B,)
  void* total;              // `weight` times the sum of all values, from a redo without `scratch`; null when not wanted
  void* grad_x;             // (B, N, D), or (B, N, M) for a cost matrix; null when not wanted
  void* grad_y;             // (B, M, D); null when not wanted
  void* sum_x;              // where grad_x and grad_y are summed: themselves, or float32 scratch for 16-bit gradients
  void* sum_y;
  u8* states;               // saved lane states, one per checkpoint of each strip
  u8* bounds;               // saved bottom row of each strip
  u8* scratch;              // the words below that are all ones at first; null when nobody will need them again
  u8* rows;                 // one hand-off row per pair, all ones at first, and two words for each of its strips
  u8* more_rows;            // one more for the second half of wide words
  u32* tickets;             // one counter, all ones at first
  u32* other_tickets;       // the counter of the launch that follows, or came before
  u32* health;              // (B,) all ones; a narrow kernel clears bit 0 of a pair that is beyond its range;
                            // [B] is the same for the whole batch, unless `scan`
  u32* tokens;              // (B, 4) all ones; how far the second walks of a pair have come
  u32* turns;               // (B, column tiles) all ones; strips that have still to add to this part of grad_y
  i64 x_stride, y_stride;   // elements from one sample to the next, 0 for a broadcast sample
  i64 pair_bytes;           // from one pair's states (and bounds) to the next pair's
  i64 row_bytes;            // from one pair's hand-off row to the next pair's; 0 where no pair has several strips
  i64 more_row_bytes;
  i64 scratch_bytes;        // a multiple of 16
  i64 grad_stride;          // of `grad`; 0 when one number stands for all samples
  double scale;             // log2(e) / gamma
  double unscale;           // gamma * ln(2)
  double weight;            // gradient of every sample's value where `grad` is null
  i32 batch, n, m, d;
  i32 bandwidth;            // |i - j| <= bandwidth; at least n + m when there is no band
  i32 strips;               // strips of the longest sample
  i32 checkpoints;          // checkpoints kept per strip
  i32 bound_columns;        // columns kept of each bottom row
  i32 tiles;                // column tiles of 32
  i32 lead;                 // backward: a strip begins where the one so many before it found mass; the first so many at their end
  i32 redo;                 // 1: walk only the pairs whose health is bad, however few blocks there are
  i32 scan;                 // 1: health[B] says nothing, so a redo looks at all pairs
  i32 blocks;               // of the launch
  i32 save;                 // forward: keep states and bounds
  i32 grad_x_wide;          // 16-bit input whose gradient is wanted in float32 (a broadcast side)
  i32 grad_y_wide;
};

// ---- element types
#if INPUT == 0
typedef float element;
DEVICE float to_float(element v) { return v; }
#elif INPUT == 1
typedef double element;
DEVICE double to_float(element v) { return v; }
#elif INPUT == 2
typedef u16 element;
DEVICE float to_float(element v) { return half_to_float(v); }
#else
typedef u16 element;
DEVICE float to_float(element v) { return float_of((u32)v << 16); }
#endif
#if INPUT == 1
typedef double result_type;  // of values and of summed gradients
#else
typedef float result_type;
#endif

DEVICE result_type gradient_of_value(const Params& p, i32 pair) {
  return p.grad ? ((const result_type*)p.grad)[pair * p.grad_stride] : (result_type)p.weight;
}
DEVICE void store_gradient(void* base, i64 index, result_type v, i32 wide) {
#if INPUT == 2
  if (wide) ((float*)base)[index] = v; else ((u16*)base)[index] = float_to_half(v);
#elif INPUT == 3
  if (wide) { ((float*)base)[index] = v; return; }
  u32 bits = bits_of(v);
  ((u16*)base)[index] = v != v ? (u16)0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#else
  ((result_type*)base)[index] = v;
#endif
}

// ---- scaled numbers: Z = f * 2^-n
// Narrow numbers never hold f = 0: "no path" is n = NO_PATH with any ordinary f, and a term shifted past MAX_SHIFT
// weighs 2^-100 of the largest, far below the last bit of any sum. That lets a shift be one integer multiply-add on
// the float's bits. Wide numbers shift by multiplication, so that zeros and NaN mean what they should.
#if WIDE
typedef double real;
typedef i64 exponent;
#define NO_PATH ((i64)1 << 60)
#define FORBIDDEN_FROM 4503599627370496.0  // 2^52: beyond it a cost forbids its cell, as +inf does
#define MAX_SHIFT ((i64)1023)
#define EMPTY_FRACTION 0.0
#else
typedef float real;
typedef i32 exponent;
#define NO_PATH (1 << 30)
#define FORBIDDEN_FROM 4194304.0f  // 2^22, the end of the rounding trick's range
#define MAX_SHIFT 100
#define EMPTY_FRACTION 1.0f
#endif

struct Scaled { real f; exponent n; };
DEVICE Scaled no_path() { return Scaled{(real)EMPTY_FRACTION, (exponent)NO_PATH}; }
DEVICE Scaled one() { return Scaled{(real)1, (exponent)0}; }

// 2^-s as v * 2^-n, v within [0.7, 1.42]: eq. (6).
struct Weight { real v; exponent n; };

DEVICE real shifted(real f, exponent k) {
#if WIDE
  return f * double_of((u64)(1023 - k) << 52);  // k = 1023 gives exactly zero
#else
  return float_of(bits_of(f) - ((u32)k << 23));
#endif
}

DEVICE Weight weight_of(real s) {
#if WIDE
  if (s != s || s < -FORBIDDEN_FROM) return Weight{s - s, 0};  // NaN poisons the sample; so does -inf
  if (s >= FORBIDDEN_FROM) return Weight{0.0, NO_PATH};
  double whole = round_nearest(s);
  return Weight{exp2_exact(whole - s), (i64)whole};
#else
#if BANDED
  bool forbidden = !(s < FORBIDDEN_FROM);
  s = min_of(s, FORBIDDEN_FROM);
#endif
  // Adding 1.5 * 2^23 leaves round(s) in the low bits of the sum.
  const float magic = 12582912.0f;
  float shifted_s = s + magic;
  i32 whole = (i32)(bits_of(shifted_s) - bits_of(magic));
  float v = exp2_fast((shifted_s - magic) - s);
#if BANDED
  whole = forbidden ? NO_PATH - 1 : whole;  // added to NO_PATH it just fits 32 bits
#endif
  return Weight{v, whole};
#endif
}

// The three terms of eq. (5), brought to the exponent m.
struct Terms { real up, left, diagonal; exponent m; };
DEVICE Terms align(const Scaled& up, const Scaled& left, const Scaled& diagonal) {
  Terms t;
  t.m = min_of3(up.n, left.n, diagonal.n);
  t.up = shifted(up.f, add_then_min(up.n, -t.m, (exponent)MAX_SHIFT));
  t.left = shifted(left.f, add_then_min(left.n, -t.m, (exponent)MAX_SHIFT));
  t.diagonal = shifted(diagonal.f, add_then_min(diagonal.n, -t.m, (exponent)MAX_SHIFT));
  return t;
}
DEVICE real sum_of(const Terms& t) { return t.up + (t.left + t.diagonal); }
DEVICE Scaled times(real sum, exponent m, const Weight& w) {  // eq. (6)
#if WIDE || BANDED
  // The limit also catches sums beyond 32 bits: they end at NO_PATH, and the result tells.
  return Scaled{sum * w.v, add_then_min(m, w.n, (exponent)NO_PATH)};
#else
  return Scaled{sum * w.v, m + w.n};  // no forbidden cells: 16 steps add 2^25 at most, and renormalize has the limit
#endif
}
// Moves f's exponent into n; done every 16 steps, in which f grows by 4.3^16 = 2^34 at most.
DEVICE void renormalize(Scaled& z) {
#if WIDE
  i64 e = (i64)((bits_of(z.f) >> 52) & 2047) - 1023;
  if (e == -1023 || e == 1024) return;  // zero or NaN
  z.f = double_of(bits_of(z.f) - ((u64)e << 52));
#else
  i32 e = (i32)(bits_of(z.f) >> 23) - 127;
  z.f = float_of(bits_of(z.f) - ((u32)e << 23));
#endif
  z.n = add_then_min(z.n, -e, (exponent)NO_PATH);
}

// The shares of eq. (7). A sum of zero has no predecessor and passes nothing on.
struct Shares { real up, left, diagonal; };
DEVICE Shares shares_of(const Terms& t, real sum) {
#if WIDE
  if (sum == 0.0) return Shares{0.0, 0.0, 0.0};
  return Shares{t.up / sum, t.left / sum, t.diagonal / sum};
#else
  // A lone path must keep all of its mass: the product of a number and its reciprocal is often 1 - 2^-24. A thousand such
  // steps upwards lose 10^-5 or more, and what diagonal steps lose goes left, to cells that may be 1000 times as far apart
  // as those of the path are. So these two shares are divided exactly; the left one is what they leave.
  const real inverse = reciprocal_fast(sum);
  auto divided = [&](real term) {
    const real quotient = term * inverse;
    return multiply_add(multiply_add(-quotient, sum, term), inverse, quotient);
  };
#if BANDED
  // From a forbidden cell (at most 2^-66 by now) nothing comes at all.
  Shares share{divided(t.up), t.left * inverse, divided(t.diagonal)};
  share.left = share.left < 1.0e-19f ? 0.0f : 1.0f - share.up - share.diagonal;
  return share;
#else
  return Shares{divided(t.up), t.left * inverse, divided(t.diagonal)};
#endif
#endif
}

// ---- geometry of one strip of one pair
struct Strip {
  i32 pair, index;        // which
  i32 n, m;               // the pair's own lengths
  i32 first_row, last_row;
  i32 first_column, last_column;
  i32 bandwidth;
  bool valid;             // lengths and band make sense; false for every strip of a pair or for none
  bool present;           // the pair is long enough to have this strip
  bool is_last;           // holds the pair's last row
};

DEVICE Strip strip_of(const Params& p, i32 pair, i32 index) {
  Strip s;
  s.pair = pair;
  s.index = index;
  s.n = p.x_lengths ? p.x_lengths[pair] : p.n;
  s.m = p.y_lengths ? p.y_lengths[pair] : p.m;
  s.bandwidth = p.bandwidth;
  i32 difference = s.n > s.m ? s.n - s.m : s.m - s.n;
  s.valid = s.n >= 1 && s.n <= p.n && s.m >= 1 && s.m <= p.m && difference <= p.bandwidth;
  s.first_row = index * STRIP_ROWS;
  s.present = s.first_row < s.n;
  s.is_last = s.first_row + STRIP_ROWS >= s.n;
  s.last_row = s.is_last ? s.n - 1 : s.first_row + STRIP_ROWS - 1;
  // One column more than the strip's own rows have: the row above reaches the first of them by its diagonal.
  s.first_column = s.first_row - 1 > p.bandwidth ? s.first_row - 1 - p.bandwidth : 0;
  s.last_column = s.m - 1 < s.last_row + p.bandwidth ? s.m - 1 : s.last_row + p.bandwidth;
  return s;
}
DEVICE bool in_band(const Strip& s, i32 row, i32 column) {
  i32 offset = row - column;
  return column >= 0 && column < s.m && offset <= s.bandwidth && -offset <= s.bandwidth;
}
// Step at which the strip is at the pair's last cell.
DEVICE i32 final_step(const Strip& s) { return s.m - 1 + (s.n - 1 - s.first_row); }
DEVICE i32 last_step(const Strip& s) { return s.last_column + (s.last_row - s.first_row); }

// ---- hand-off between strips
// Strip k passes one row to the next strip in the order of the walk (downwards in the forward, upwards in the
// backward) through its pair's row buffer. Each word carries k, so a reader knows whose it is; the buffer starts as all
// ones, which is no strip. No fence is needed: each half of a word carries k beside what it vouches for, a half is
// one indivisible 8-byte access however the compiler arranges it, and nothing else is read on the strength of it.
//
// Why a word is not overwritten before it is read: strip k's word has one reader, strip k + 1, and the next to store
// there is that same strip, STRIP_ROWS - 1 steps after the step that needed the word. A band does not change that:
// whether a column's word is stored and whether it is read is one question, asked in the same words (in_band of the
// upper strip's last row, passes_up of the lower strip's first), so a strip has read whatever the one before it stored
// where it stores itself. (In the backward one word may be read by nobody, at the band's right edge; nobody stores there
// again either.)
//
// Why it cannot hang: strips are handed out by a ticket in the order of the walk, so the strip being waited for holds
// an earlier ticket and is running or done; the first strip of a pair waits for nobody; a reader waits only for columns
// that the band makes its neighbour write. By induction every word that is polled gets written. k is a field of its
// own, so no input, NaN included, can forge or hide it.
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
  return RowWord{load_shared_word(row.first + column), load_shared_word(row.second + column)};
}
DEVICE void store_word(const HandoffRow& row, i32 column, const RowWord& w) {
  store_shared_word(row.first + column, w.first);
  store_shared_word(row.second + column, w.second);
}
#else
typedef Word4 RowWord;
struct HandoffRow { Word4* first; };
DEVICE RowWord pack(u32 a, u32 b, u32 owner) { return RowWord{a, owner, b, owner}; }
DEVICE bool is_from(const RowWord& w, u32 owner) { return w.b == owner && w.d == owner; }
DEVICE RowWord pack_state(const Scaled& z, u32 owner) { return pack(bits_of(z.f), (u32)z.n, owner); }
DEVICE Scaled unpack_state(const RowWord& w) { return Scaled{float_of(w.a), (i32)w.c}; }
DEVICE RowWord load_word(const HandoffRow& row, i32 column) { return load_shared_word(row.first + column); }
DEVICE void store_word(const HandoffRow& row, i32 column, const RowWord& w) { store_shared_word(row.first + column, w); }
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
DEVICE RowWord await_word(const HandoffRow& row, i32 column, u32 owner) {
  RowWord w = load_word(row, column);
  while (!is_from(w, owner)) {
    wait_a_little();
    w = load_word(row, column);
  }
  return w;
}

// ---- where there is mass
// In the backward a strip leaves out what has no mass, and tells the strips above it, by two words behind the pair's
// hand-off row, where it begins and where it has ended; tiled.cu and inline.cu say what that means to each of them.
// What comes in from the strip below counts from LEAST_MASS on, and is nothing below that.
#if WIDE
#define LEAST_MASS 7.7037197775489434e-34  // 2^-110 of the whole
#else
#define LEAST_MASS 8.8817842e-16f  // 2^-50; more than what leaks through forbidden cells
#endif
#define NOWHERE (-1)
DEVICE void tell_begin(const Params& p, const HandoffRow& row, i32 walk_index, i32 where) {
  store_word(row, p.m + walk_index, pack((u32)where, 0u, (u32)walk_index));
}
DEVICE i32 await_begin(const Params& p, const HandoffRow& row, i32 walk_index) {
#if WIDE
  return (i32)unpack_half(await_word(row, p.m + walk_index, (u32)walk_index).first);
#else
  return (i32)await_word(row, p.m + walk_index, (u32)walk_index).a;
#endif
}
// All ones, NOWHERE, until its strip releases it.
DEVICE u32* end_of(const Params& p, const HandoffRow& row, i32 walk_index) { return (u32*)(row.first + p.m + p.strips + walk_index); }
// For who reads nothing else on the strength of it.
DEVICE i32 peek_end(const u32* end) { return (i32)load_shared_word((const Word2*)end).a; }
// What the strip below passes up at a column: nothing if it has ended before.
struct Received { Flow flow; bool there; };
DEVICE Received await_flow(const HandoffRow& row, i32 column, u32 owner, const u32* end) {
  for (;;) {
    RowWord w = load_word(row, column);
    if (!is_from(w, owner) && load_acquire(end) != ~0u) {
      w = load_word(row, column);
      if (!is_from(w, owner)) return Received{Flow{0, 0}, false};
    }
    if (is_from(w, owner)) return Received{unpack_flow(w), true};
    wait_a_little();
  }
}

// Tickets start at all ones, so that one fill prepares every buffer of a launch. Two launches take turns with two
// counters; each readies the other's.
DEVICE u32 next_ticket(const Params& p) {
  const u32 ticket = fetch_add(p.tickets, 1u) + 1u;
  if (ticket == 0u) *p.other_tickets = ~0u;
  return ticket;
}

// What a redo finds in memory that no fill has prepared: by one thread, before its block says anything of the pair's health.
DEVICE void prepare_redo(const Params& p, i32 pair) {
  p.health[pair] = ~0u;
  ((Word4*)p.tokens)[pair] = Word4{~0u, ~0u, ~0u, ~0u};
  if (pair == 0) *p.other_tickets = ~0u;
}

// Whose strip a ticket is: strip by strip, in each all pairs, so that a strip mostly finds its row there already. Handing
// out groups of 64 to 256 pairs one after the other instead was slower (512 pairs, 1024 x 1024, D = 1: by 7 to 30 %).
// `turn` counts a pair's strips in the order of the walk.
struct Assignment { i32 pair, turn; };
DEVICE Assignment assignment_of(const Params& p, u32 ticket) {
  return Assignment{(i32)(ticket % (u32)p.batch), (i32)(ticket / (u32)p.batch)};
}

#if WIDE
// ---- second walks
// The launch that follows a narrow kernel walks flagged pairs again, and leaves the scratch as the first fill had it, so
// that the next launch on the same state finds it so. A pair's tokens say how far its walks have come, a walk of the
// forward in the first two, of the backward in the last two:
//   rows    1 once the walk's first strip has cleared what the walk before left behind
//   strips  how many strips (less one, from all ones) are done, in the order of the walk
// Each strip waits only for strips with earlier tickets: those of its own walk before it, and all of the walk before.
DEVICE u32* rows_token(const Params& p, i32 pair, i32 walk) { return p.tokens + (i64)pair * 4 + walk * 2; }
DEVICE u32* strips_token(const Params& p, i32 pair, i32 walk) { return rows_token(p, pair, walk) + 1; }
DEVICE void await_token(const u32* token, u32 wanted) {
  if (lane_index() == 0) while (load_acquire(token) != wanted) wait_a_little();
  warp_barrier();
}
DEVICE void clear_rows(const Params& p, i32 pair, bool further) {
  const Word4 ones{~0u, ~0u, ~0u, ~0u};
  const HandoffRow row = handoff_row(p, pair);
  if (p.row_bytes)
    for (i32 i = (i32)lane_index(); i < (i32)(p.row_bytes / sizeof(Word4)); i += 32) {
      row.first[i] = ones;
      if (further) row.second[i] = ones;
    }
  if (p.turns) for (i32 i = (i32)lane_index(); i < p.tiles; i += 32) p.turns[(i64)pair * p.tiles + i] = ~0u;
}
// `turn` of turns 0 to `last` of a pair's walk.
DEVICE_CALL void begin_second_walk(const Params& p, i32 pair, i32 walk, i32 turn, i32 last) {
  if (turn > 0) { await_token(rows_token(p, pair, walk), 1u); return; }
  if (walk == 1) await_token(strips_token(p, pair, 0), (u32)last);
  clear_rows(p, pair, true);
  warp_barrier();
  if (lane_index() == 0) store_release(rows_token(p, pair, walk), 1u);
}
// The pair's scratch as the first fill had it.
DEVICE_CALL void restore_scratch(const Params& p, i32 pair) {
  if (!p.scratch) return;
  clear_rows(p, pair, false);
  if (lane_index() < 4) p.tokens[(i64)pair * 4 + lane_index()] = ~0u;
}
DEVICE_CALL void end_second_walk(const Params& p, i32 pair, i32 walk, i32 turn, i32 last, bool last_walk) {
  warp_barrier();
  u32* token = strips_token(p, pair, walk);
  if (turn > 0) await_token(token, (u32)(turn - 1));
  if (last_walk && turn == last) restore_scratch(p, pair);
  else if (lane_index() == 0) store_release(token, (u32)turn);
}
// No sample was flagged: the blocks share the clearing of everything.
DEVICE void restore_scratch(const Params& p) {
  if (!p.scratch) return;
  for (i64 i = (i64)block_index() * 32 + lane_index(); i < p.scratch_bytes / 16; i += (i64)p.blocks * 32)
    ((Word4*)p.scratch)[i] = Word4{~0u, ~0u, ~0u, ~0u};
}
#endif
