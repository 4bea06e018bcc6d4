// The backward of a strip by a block, role by role, in slots of one chunk.
//
// recompute walks checkpoint K forwards, chunk by chunk, leaving in shared memory what the shares (7) come of; sweep follows
// CHECKPOINT / 32 slots later, chunks in reverse, leaving E in its ring; four warps make the costs of tiles further left;
// four turn E of the tile just completed into gX and four into gY; one warp, the grad_y sequencer, settles with the strips
// above and below in which order they add to gY, each tile of columns passed from strip to strip by a release / acquire
// flag: a fixed order, so results are bitwise reproducible.
#pragma once

// Recompute has the longer chain of the two walks. With two rows to a lane it leaves the terms (5) of a cell, and the sweep
// makes shares (7) of them: three numbers to a cell, where shares are two without a band. With one row recompute makes the
// shares: cards with little shared memory have one row, and could not hold a third number everywhere.
#define SWEEP_DIVIDES (LANE_ROWS == 2)
#define KEEP_THIRD (SWEEP_DIVIDES || KEEP_LEFT)

// What is left for a slot: nothing, and there is none; gradients of tiles that the sweep has finished; or all of it.
enum SlotWork { NOTHING, GRADIENTS, EVERYTHING };

struct alignas(16) BackwardShared {
  alignas(16) Step costs[COST_CHUNKS * 32];
  alignas(16) Step align[ALIGN_CHUNKS * 32];
  LaneShares shares[SHARE_SLOTS][32][32];  // or terms
  LaneReals left[KEEP_THIRD ? SHARE_SLOTS : 1][32][32];
  Normalization normalization;
  CostShared making;
  GradShared grads;
  StoredState top[32];
  float passed_in[32], passed_out[32];
  // What one role leaves for the others, written in a slot and read in the next: two of each, alternating.
  i32 next_slot[2];     // by place_of_slot: what is left for the slot that follows
  i32 below_end[2];     // by the slot's number: the last chunk of the strip below, NOWHERE while it has none
  i32 active_tile[2];   // by the sweep's chunk: the last tile with weight, NOWHERE while there is none
  i32 visit[2];         // by tile: whether gradients are to be made of it
  GradYOrder order[2];  // by tile
  BackwardSchedule schedule;
  u32 ticket;
};
static_assert(sizeof(BackwardShared) == BACKWARD_SHARED, "kernel.py has another size of shared memory");
static_assert(sizeof(ClosingShared) <= sizeof(BackwardShared::costs) + sizeof(BackwardShared::align),
              "when a strip is closed, costs and alignments, the first of the block's memory, are done with");

// What recompute leaves of a cell for the sweep, and what the sweep makes of a lane's cells.
DEVICE void keep(StepShares& now, int q, const Terms& t, real sum) {
  if constexpr (SWEEP_DIVIDES) {
    now.shares.up[q] = t.up;
    now.left.row[q] = t.left;
    now.shares.diagonal[q] = t.diagonal;
  } else {
    now.keep(q, t, sum);
  }
}
DEVICE void divide(LaneShares& shares, LaneReals& left) {
  StepShares made;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) {
    const Terms t{shares.up[q], left.row[q], shares.diagonal[q], 0};
    made.keep(q, t, sum_of(t));
  }
  shares = made.shares;
  left = made.left;
}

// Where the shares of a chunk live. With two chunks to a checkpoint the second always uses slot 1 and the first alternates
// between 0 and 2: the sweep still reads it while the next checkpoint's first chunk is recomputed.
DEVICE i32 share_slot(i32 order, i32 sub) {
  if constexpr (CHUNKS_PER_CHECKPOINT == 1) return order & 1;
  else return sub == 1 ? 1 : (order & 1) * 2;
}

// Which warp does what. Warp w runs on scheduler w % 4; roles are dealt out so that each scheduler issues about as many
// instructions per slot, with the two walks, the longest chains, on schedulers of their own.
#define BACKWARD_THREADS (32 * 16)
enum Role { RECOMPUTE, SWEEP, COSTS, GRAD_X, GRAD_Y, SEQUENCER, IDLE };
// Role, and member of the role's group, of each warp: four bits each, warp 0 in the lowest.
#define ROLES 0x4446334322352210ull
#define MEMBERS 0x2130320031102000ull
DEVICE Role role_of(u32 warp) { return (Role)(i32)(ROLES >> (warp * 4u) & 15u); }
// Every role reads its thread and lane for itself: what two of them compute alike, all would keep in registers.
DEVICE i32 own_lane() { return (i32)(thread_index_opaque() & 31u); }
// This thread's number within its group.
DEVICE i32 own_thread() {
  const u32 thread = thread_index_opaque();
  return (i32)((u32)(MEMBERS >> ((thread >> 5) * 4u) & 3u) * 32u + (thread & 31u));
}

DEVICE void recompute_shares(const Params& p, BackwardShared& shared) {
  const BackwardSchedule& schedule = shared.schedule;
  const i32 lane = own_lane();
  const Strip s = schedule.strip;
  const i32 last_checkpoint = schedule.last_checkpoint, chunks = schedule.chunks;
  const StoredState* bound = saved_bound(p, s, s.index - 1);
  // The row above and the saved state are loaded one slot ahead.
  auto top_of = [&](i32 chunk) {
    bool there = s.index > 0 && in_band(s, s.first_row - 1, chunk * 32 + lane);
    return there ? bound[chunk * 32 + lane] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
  };
  Walker w = fresh_walker(), next = load_checkpoint(p, s, last_checkpoint);
  StoredState top = top_of(last_checkpoint * CHUNKS_PER_CHECKPOINT);
  block_barrier();
  i32 work = EVERYTHING;
  for (i32 slot = 0;; slot++) {
    if (slot < chunks && work == EVERYTHING) {
      const i32 order = slot / CHUNKS_PER_CHECKPOINT, sub = slot % CHUNKS_PER_CHECKPOINT;
      const i32 chunk = (last_checkpoint - order) * CHUNKS_PER_CHECKPOINT + sub;
      if (sub == 0) {
        w = next;
        if (last_checkpoint - order > first_checkpoint(s)) next = load_checkpoint(p, s, last_checkpoint - order - 1);
      }
      shared.top[lane] = top;
      const i32 following = sub + 1 < CHUNKS_PER_CHECKPOINT ? chunk + 1 : chunk + 1 - 2 * CHUNKS_PER_CHECKPOINT;
      if (slot + 1 < chunks) top = top_of(following);
      warp_barrier();
      const i32 at = share_slot(order, sub);
      TileSteps steps{shared.costs + ring_start(chunk, COST_CHUNKS), shared.top};
      StepShares now;
      walk(w, 32, steps, [&](int q, const Terms& t, real sum) { keep(now, q, t, sum); }, [&](i32 step) {
        shared.shares[at][step][lane] = now.shares;
        if (KEEP_THIRD) shared.left[at][step][lane] = now.left;
      });
    }
    block_barrier();
    work = shared.next_slot[place_of_slot(schedule, slot)];
    if (work == NOTHING) break;
  }
}

template <bool ALONE> DEVICE void sweep_alignment(const Params& p, BackwardShared& shared) {
  const BackwardSchedule& schedule = shared.schedule;
  const i32 lane = own_lane();
  const Strip s = schedule.strip;
  const i32 walk_index = schedule.walk_index, chunks = schedule.chunks, top_chunk = schedule.top_chunk;
  const u32 owner_in = (u32)(walk_index - 1), owner_out = (u32)walk_index;
  const HandoffRow row = handoff_row(p, s.pair);
  const float seed = seed_of(((const float*)p.value)[s.pair]);
  const i32 end = s.is_last ? final_step(s) : -1;
  const u32* end_below = end_of(p, row, walk_index - 1);
  i32 slots = schedule.slots;  // until the end is known
  const bool has_neighbours = !ALONE && p.row_bytes;
  i32 active_tile = schedule.visits_all || s.is_last ? (s.m - 1) / 32 : NOWHERE;
  bool sent = false, ended = false;
  const bool publishes_sent = begins_where_sent(p);
  bool published = false;
  auto publish_first = [&](i32 tile) {
    if (has_neighbours && lane == 0 && !published) publish_begin(p, row, walk_index, tile);
    published = true;
  };
  if (!publishes_sent && active_tile != NOWHERE) publish_first(active_tile);
  // What each row's last cell passes on; to the left it is `left`, or with a band `left` times left_share.
  float left[LANE_ROWS], left_share[LANE_ROWS], diagonal[LANE_ROWS], pass[LANE_ROWS];
  UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = left_share[q] = diagonal[q] = pass[q] = 0.0f;
  i32 column = top_chunk * 32 + lane - (STRIP_ROWS - 1);
  bool wanted = !s.is_last && passes_up(s, s.first_row + STRIP_ROWS, column);
  RowWord ahead{};
  if (wanted) ahead = load_word(row, column);
  block_barrier();
  for (i32 slot = 0;; slot++) {
    const i32 behind = slot - CHUNKS_PER_CHECKPOINT, chunk = top_chunk - behind, base = chunk * 32;
    if (ended && chunk >= 0) {  // of the tiles still to come the rest has no weight
      float* rest = &shared.align[ring_start(chunk, ALIGN_CHUNKS)][0];
      for (i32 i = lane; i < 32 * STEP_STRIDE / 4; i += 32) ((Word4*)rest)[i] = Word4{0u, 0u, 0u, 0u};
    }
    if (behind >= 0 && behind < chunks && !ended) {
      const i32 order = behind / CHUNKS_PER_CHECKPOINT, sub = chunk % CHUNKS_PER_CHECKPOINT;
      const i32 at = share_slot(order, sub);
      float passed_up = 0.0f;
      if (wanted) {
        column = base + lane - (STRIP_ROWS - 1);
        passed_up = (is_from(ahead, owner_in) ? unpack_flow(ahead) : await_flow(s, row, column, owner_in, end_below).flow).pass;
        if (passed_up < LEAST_WEIGHT) passed_up = 0.0f;
      }
      shared.passed_in[lane] = passed_up;
      const u32 received = lanes_where(passed_up != 0.0f);
      if (active_tile == NOWHERE && received) {
        active_tile = (base + highest_bit(received) - (STRIP_ROWS - 1)) / 32;
        if (!publishes_sent) publish_first(active_tile);
      }
      column = base - 32 + lane - (STRIP_ROWS - 1);
      wanted = !s.is_last && passes_up(s, s.first_row + STRIP_ROWS, column);
      if (wanted) ahead = load_word(row, column);
      warp_barrier();
      Step* align = shared.align + ring_start(chunk, ALIGN_CHUNKS);
      auto sweep_eight = [&](auto with_end, i32 eight) {
        LaneShares shares8[8];
        LaneReals left8[8];
        float in8[8];
        UNROLL for (int k = 0; k < 8; k++) {
          shares8[k] = shared.shares[at][eight + k][lane];
          if (KEEP_THIRD) left8[k] = shared.left[at][eight + k][lane];
          if (SWEEP_DIVIDES) divide(shares8[k], left8[k]);
          in8[k] = shared.passed_in[eight + k];
        }
        UNROLL for (i32 k = 7; k >= 0; k--) {
          const LaneShares& share = shares8[k];
          float passed = from_lane_below(pass[0]);
          if (lane == 31) passed = in8[k];
          LaneReals e;
          UNROLL for (int q = 0; q < LANE_ROWS; q++) {
            const float come = q + 1 < LANE_ROWS ? pass[q + 1 < LANE_ROWS ? q + 1 : q] : passed;
            e.row[q] = KEEP_LEFT ? multiply_add(left[q], left_share[q], come) : left[q] + come;
            if (decltype(with_end)::value && base + eight + k == end && s.first_row + lane * LANE_ROWS + q == s.n - 1) e.row[q] = seed;
            left[q] = KEEP_LEFT ? e.row[q] : leave_left(e.row[q], share.up[q], share.diagonal[q]);
            if (KEEP_LEFT) left_share[q] = left8[k].row[q];
            pass_on(e.row[q], share.up[q], share.diagonal[q], pass[q], diagonal[q]);
          }
          *(LaneReals*)&align[eight + k][lane * LANE_ROWS] = e;
          if (lane == 0) shared.passed_out[eight + k] = pass[0];
        }
      };
      UNROLL_BY(1) for (i32 eight = 24; eight >= 0; eight -= 8) {
        if (end >= base + eight && end < base + eight + 8) sweep_eight(Yes{}, eight);
        else sweep_eight(No{}, eight);
      }
      warp_barrier();
      const bool passes = s.index > 0 && passes_up(s, s.first_row, base + lane);
      if (passes) store_word(row, base + lane, pack_flow(Flow{shared.passed_out[lane], 0.0f}, owner_out));
      sent |= any_lane(passes && !(shared.passed_out[lane] < LEAST_WEIGHT));
      if (publishes_sent && sent) publish_first(chunk);  // whose columns, of the first row, are those of tile `chunk`
      bool has_weight = false;
      UNROLL for (int q = 0; q < LANE_ROWS; q++) {
        const float leftwards = KEEP_LEFT ? left[q] * left_share[q] : left[q];
        has_weight |= !(leftwards < LEAST_WEIGHT && diagonal[q] < LEAST_WEIGHT && pass[q] < LEAST_WEIGHT);
      }
      const bool drained = !schedule.unpruned && !any_lane(has_weight);
      if (drained)  // whether it ends or not, so that E does not depend on when it reads of the other's end
        UNROLL for (int q = 0; q < LANE_ROWS; q++) left[q] = left_share[q] = diagonal[q] = pass[q] = 0.0f;
      if (drained && (s.is_last ? base <= end : chunk <= shared.below_end[(slot & 1) ^ 1])) {
        ended = true;
        if (slot + 2 + LANE_ROWS < slots) slots = slot + 2 + LANE_ROWS;
      }
      if (ended || behind == chunks - 1) {
        publish_first(NOWHERE);
        warp_barrier();
        if (has_neighbours && lane == 0) store_release(end_of(p, row, walk_index), (u32)chunk);
      }
    }
    if (lane == 0) {
      shared.active_tile[chunk & 1] = active_tile;
      shared.order[chunk & 1].last = schedule.visits_all ? chunk > schedule.last_tile_above : !sent;
      shared.next_slot[place_of_slot(schedule, slot)] = slot + 1 >= slots ? NOTHING : ended ? GRADIENTS : EVERYTHING;
    }
    block_barrier();
    if (slot + 1 >= slots) break;
  }
}

// Costs of tiles from right to left, as many ahead of recompute as its first checkpoint needs. The slots before the first,
// in which the others wait, make what recompute will find there.
DEVICE void make_backward_costs(const Params& p, BackwardShared& shared) {
  const BackwardSchedule& schedule = shared.schedule;
  const i32 thread = own_thread();
  const CopyOrReference<Strip, COSTS_COPY_STRIP>::type s = schedule.strip;
  CostMaker maker = open_costs(p, s, shared.normalization, COST_BARRIER, schedule.last_tile, thread);
  i32 work = EVERYTHING;
  // In slot t the tile is schedule.needed - 1 - t.
  for (i32 tile = schedule.last_tile >= schedule.needed ? schedule.last_tile : schedule.needed;; tile--) {
    if (work == EVERYTHING && touches(schedule.strip, tile))
      make_costs(maker, p, s, shared.normalization, shared.making, shared.costs, COST_CHUNKS, tile,
                 tile > first_tile(schedule.strip) ? tile - 1 : -1, COST_ADDRESSES_RECOMPUTED ? opaque(thread) : thread);
    if (tile > schedule.needed) {
      group_barrier(COST_BARRIER, GROUP);
      continue;
    }
    block_barrier();
    if (tile < schedule.needed) work = shared.next_slot[place_of_slot(schedule, schedule.needed - 1 - tile)];
    if (work == NOTHING) break;
  }
}

DEVICE void make_grad_x_of_strip(const Params& p, BackwardShared& shared, ClosingShared& closing) {
  const BackwardSchedule& schedule = shared.schedule;
  const i32 thread = own_thread();
  const Strip s = schedule.strip;
  GradX maker = open_grad_x(p, s, shared.normalization, shared.grads, schedule.last_tile, thread);
  block_barrier();
  bool begun = false;
  // In slot t the tile is top_chunk + CHUNKS_PER_CHECKPOINT + 1 - t.
  for (i32 tile = schedule.top_chunk + CHUNKS_PER_CHECKPOINT + 1;; tile--) {
    if (shared.visit[tile & 1]) {
      make_grad_x(maker, p, s, shared.normalization, shared.grads, shared.align, tile, !begun,
                  GRAD_X_ADDRESSES_RECOMPUTED ? own_thread() : thread);
      begun = true;
    } else if (!begun && tile <= schedule.last_tile && tile > first_tile(schedule.strip)) {
      prefetch_tile(maker, p, schedule.strip, shared.normalization, tile - 1, own_thread());
    }
    block_barrier();
    if (shared.next_slot[place_of_tile(schedule, tile)] == NOTHING) break;
  }
  leave_sums(maker, shared.grads, closing, own_thread());
}

DEVICE void make_grad_y_of_strip(const Params& p, BackwardShared& shared) {
  const BackwardSchedule& schedule = shared.schedule;
  const i32 thread = own_thread();
  const CopyOrReference<Strip, GRAD_Y_COPY_STRIP>::type s = schedule.strip;
  const float factor = gradient_of_value(p, s.pair);
  GradY maker = open_grad_y(p, s, thread);
  block_barrier();
  // In slot t the tile is top_chunk + CHUNKS_PER_CHECKPOINT + 1 - t.
  for (i32 tile = schedule.top_chunk + CHUNKS_PER_CHECKPOINT + 1;; tile--) {
    if (shared.visit[tile & 1]) {
      const CopyOrReference<GradYOrder, GRAD_Y_COPY_ORDER>::type order = shared.order[tile & 1];
      make_grad_y(maker, p, s, order, shared.normalization, shared.grads, shared.align, tile, factor, thread);
    }
    block_barrier();
    if (shared.next_slot[place_of_tile(schedule, tile)] == NOTHING) break;
  }
}

// Whether the strip is the first to add to `tile` of gY, known once the strip below has added to it or has ended before it.
DEVICE bool await_order(const BackwardSchedule& schedule, const u32* order, const u32* end_below, i32 tile) {
  Poll poll(Waiter{"the strip below to add to a tile of grad_y", schedule.strip.pair, schedule.strip.index}, schedule.walk_index - 1, tile);
  for (;;) {
    if (load_acquire(&order[tile]) == (u32)(schedule.walk_index - 1)) return false;
    const i32 end = peek_end(end_below);
    if (end != NOWHERE && tile < end - LANE_ROWS) return true;  // the strip below did not come to this tile
    poll.failed();
  }
}
// The grad_y sequencer.
DEVICE void sequence_grad_y(const Params& p, BackwardShared& shared) {
  const BackwardSchedule& schedule = shared.schedule;
  const i32 lane = own_lane();
  const Strip& s = schedule.strip;
  u32* order = p.grad_y_order + (i64)s.pair * p.tiles;
  const u32* end_below = end_of(p, handoff_row(p, s.pair), schedule.walk_index - 1);
  const bool sums_grad_y = MODE != COST_MATRIX && p.grad_y;
  bool at_work = false, next = false;  // whether gradients work on a tile in this slot; in the next
  block_barrier();
  for (i32 slot = 0;; slot++) {
    // Gradients work on `tile` in this slot, on tile + 1 in the one before, on tile - 1 in the next.
    const i32 tile = schedule.top_chunk - (slot - CHUNKS_PER_CHECKPOINT) + 1;
    if (lane == 0) {
      if (sums_grad_y && at_work && s.index > 0) store_release(&order[tile + 1], (u32)schedule.walk_index);
      at_work = next;
      next = slot >= CHUNKS_PER_CHECKPOINT && touches(s, tile - 1) && tile - 1 <= shared.active_tile[tile & 1];
      bool first = true;
      if (sums_grad_y && next && tile - 1 >= schedule.first_tile_below && tile - 1 <= schedule.last_tile_below)
        first = await_order(schedule, order, end_below, tile - 1);
      shared.visit[(tile - 1) & 1] = next;
      shared.order[(tile - 1) & 1].first = first;
      if (at_work) shared.below_end[slot & 1] = s.is_last ? NOWHERE : peek_end(end_below);
    }
    block_barrier();
    if (shared.next_slot[place_of_slot(schedule, slot)] == NOTHING) {
      if (lane == 0 && sums_grad_y && at_work && s.index > 0) store_release(&order[tile], (u32)schedule.walk_index);
      break;
    }
  }
}

DEVICE void stay_idle(BackwardShared& shared) {
  block_barrier();
  for (i32 slot = 0;; slot++) {
    block_barrier();
    if (shared.next_slot[place_of_slot(shared.schedule, slot)] == NOTHING) break;
  }
}

// By all BACKWARD_THREADS threads of a block; ALONE as in the forward.
template <bool ALONE> DEVICE void backward_pass(const Params& p, BackwardShared& shared) {
  if (!ALONE && thread_index() == 0) shared.ticket = next_ticket(p);
  fill_ring<BACKWARD_THREADS>(&shared.costs[0][0], COST_CHUNKS * 32 * STEP_STRIDE, BLANK_COST);
  fill_ring<BACKWARD_THREADS>(&shared.align[0][0], ALIGN_CHUNKS * 32 * STEP_STRIDE, 0.0f);
  block_barrier();
  const Assignment mine = ALONE ? Assignment{(i32)block_index(), 0} : assignment_of(p, shared.ticket);
  {
    const Strip s = strip_of(p, mine.pair, p.strips - 1 - mine.position);
    if (!s.valid || !s.present || !is_in_range(p, s.pair)) return;
    make_normalization<BACKWARD_THREADS>(shared.normalization, p, s);
    if (thread_index() == 0) {
      shared.schedule = await_schedule<ALONE>(p, s);
      UNROLL for (int i = 0; i < 2; i++) {
        shared.active_tile[i] = shared.below_end[i] = NOWHERE;
        shared.visit[i] = 0;
      }
    }
  }
  block_barrier();
  const Role role = role_of(warp_index());
  ClosingShared& closing = *(ClosingShared*)shared.costs;
  if (role == RECOMPUTE) recompute_shares(p, shared);
  else if (role == SWEEP) sweep_alignment<ALONE>(p, shared);
  else if (role == COSTS) make_backward_costs(p, shared);
  else if (role == GRAD_X) make_grad_x_of_strip(p, shared, closing);
  else if (role == GRAD_Y) make_grad_y_of_strip(p, shared);
  else if (role == SEQUENCER) sequence_grad_y(p, shared);
  else stay_idle(shared);
  if (!CLOSES_GRAD_X || !p.grad_x) return;
  block_barrier();
  close_grad_x<BACKWARD_THREADS>(p, shared.schedule.strip, shared.normalization, shared.grads, closing);
}
