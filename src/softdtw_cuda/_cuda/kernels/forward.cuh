// The forward walk of a strip by one warp: the row above comes in, the bottom row goes out, 32 steps at a time.
#pragma once

struct ForwardWalk {
  HandoffRow row;
  StoredState* bound;  // where the strip's bottom row is saved
  Walker walker;
  i32 end;             // step of the pair's last cell; -1 if it is not in this strip
  Scaled result;       // that cell
  i32 leaving;         // the row that leaves the strip: its bottom one, or the pair's last
  // The row above is loaded 32 columns before it is needed; only if it was not there yet is it polled.
  RowWord ahead;
  bool wanted;
};
DEVICE ForwardWalk open_forward(const Params& p, const Strip& s) {
  ForwardWalk f{};
  f.row = handoff_row(p, s.pair);
  f.bound = saved_bound(p, s, s.index);
  f.walker = first_walker(s);
  f.end = s.is_last ? final_step(s) : -1;
  f.result = no_path();
  f.leaving = s.is_last ? s.n - 1 - s.first_row : STRIP_ROWS - 1;
  return f;
}
DEVICE void load_row_above(ForwardWalk& f, const Strip& s, i32 step) {
  const i32 column = step + (i32)lane_index();
  f.wanted = s.index > 0 && in_band(s, s.first_row - 1, column);
  if (f.wanted) f.ahead = load_word(f.row, column);
}

// Steps `base` to `base` + 31. `top` and `bottom` are 32 words of shared memory each.
template <class Inputs>
DEVICE void walk_chunk(ForwardWalk& f, const Params& p, const Strip& s, i32 base, StoredState* top, StoredState* bottom, Inputs inputs) {
  const i32 lane = (i32)lane_index();
  const u32 owner_in = (u32)(s.index - 1), owner_out = (u32)s.index;
  StoredState above{(real)EMPTY_FRACTION, (exponent)NO_PATH};
  if (f.wanted) {
    if (!is_from(f.ahead, owner_in)) f.ahead = await_word(f.row, base + lane, owner_in, Waiter{"the row above", s.pair, s.index});
    Scaled z = unpack_state(f.ahead);
    above = StoredState{z.f, z.n};
  }
  top[lane] = above;
  load_row_above(f, s, base + 32);
  warp_barrier();
  inputs.seek();
  auto steps = [&](auto last_strip) {
    walk(f.walker, 32, inputs, [](int, const Terms&, real) {}, [&](i32 step) {
      if (decltype(last_strip)::value) {
        if (lane == f.leaving / LANE_ROWS) bottom[step] = row_of(f.walker, f.leaving % LANE_ROWS);
      } else {
        if (lane == 31) bottom[step] = row_of(f.walker, LANE_ROWS - 1);
      }
    });
  };
  if (WIDE || s.is_last) steps(Yes{});
  else steps(No{});
  warp_barrier();
  const i32 column = base + lane - (STRIP_ROWS - 1);
  if (!s.is_last && in_band(s, s.first_row + STRIP_ROWS - 1, column)) {
    StoredState z = bottom[lane];
    store_word(f.row, column, pack_state(Scaled{z.f, z.n}, owner_out));
    if (p.save) f.bound[column] = z;
  }
  if (f.end >= base && f.end < base + 32) {
    StoredState z = bottom[f.end - base];
    f.result = Scaled{z.f, z.n};
  }
  warp_barrier();
}

// The pair's value, by its last strip.
DEVICE void store_value(const ForwardWalk& f, const Params& p, const Strip& s) {
  if (!s.is_last || lane_index() != 0) return;
  ((result_type*)p.value)[s.pair] = (result_type)value_of(f.result, p.unscale);
  if (!WIDE && f.result.n >= 1 << 29) flag_out_of_range(p, s.pair);
}
