// Which strip a block or warp works on: tickets, handed out in the order of the walk.
#pragma once

// Tickets start at all ones, so that one fill prepares every buffer of a launch. Two launches alternate between two
// counters; each prepares the other's.
DEVICE u32 next_ticket(const Params& p) {
  const u32 ticket = fetch_add(p.tickets, 1u) + 1u;
  if (ticket == 0u) *p.other_tickets = ~0u;
  return ticket;
}
// The same ticket for all lanes of a warp.
DEVICE u32 next_ticket_of_warp(const Params& p) {
  u32 ticket = 0;
  if (lane_index() == 0) ticket = next_ticket(p);
  return from_lane(ticket, 0);
}

// Whose strip a ticket is: strip by strip, in each all pairs, so that a strip mostly finds its row there already. Handing
// out groups of 64 to 256 pairs one after the other instead was slower (512 pairs, 1024 x 1024, D = 1: by 7 to 30 %).
// `position` counts a pair's strips in the order of the walk.
struct Assignment { i32 pair, position; };
DEVICE Assignment assignment_of(const Params& p, u32 ticket) {
  return Assignment{(i32)(ticket % (u32)p.batch), (i32)(ticket / (u32)p.batch)};
}
