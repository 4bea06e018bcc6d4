// The forward of a strip with wide numbers, by one warp.
#pragma once

struct alignas(64) ForwardShared {
  StoredState top[32], bottom[32];
  CostSteps costs;
};
static_assert(sizeof(ForwardShared) == FORWARD_SHARED, "kernel.py has another size of shared memory");

DEVICE void forward_strip(const Params& p, const Strip& s, ForwardShared& shared) {
  ForwardWalk f = open_forward(p, s);
  const Costs costs = open_costs(p, s);
  const i32 start = first_checkpoint(s) * CHECKPOINT;
  load_row_above(f, s, start);
  for (i32 base = start; base <= last_step(s); base += 32) {
    if (base % CHECKPOINT == 0) save_checkpoint(p, s, base / CHECKPOINT, f.walker);
    walk_chunk(f, p, s, base, shared.top, shared.bottom, WideSteps{shared.costs, costs, p, s, base, shared.top});
  }
  const bool value_is_known = p.rerun && p.save && p.grad;  // only the states are wanted
  if (!value_is_known) store_value(f, p, s);
}
