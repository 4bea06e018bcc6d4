// The sweep of the backward, cell by cell.
//
//   (8)     E_ij = E_{i+1,j} p_up(i+1,j) + E_{i,j+1} p_left(i,j+1) + E_{i+1,j+1} p_diag(i+1,j+1),   E_NM = 1
#pragma once

// A lane's rows, read and written in one access.
struct alignas(sizeof(real) * LANE_ROWS) LaneReals { real row[LANE_ROWS]; };
struct alignas(2 * sizeof(real) * LANE_ROWS) LaneShares { real up[LANE_ROWS], diagonal[LANE_ROWS]; };
// Where nothing is forbidden the left share is what the other two leave of E, and need not be kept; next to a forbidden
// cell it must be exactly nothing, so there it is.
#define KEEP_LEFT BANDED

// The shares (7) of a step's cells, one row after the other.
struct StepShares {
  LaneShares shares;
  LaneReals left;
  METHOD void keep(int q, const Terms& t, real sum) {
    const Shares share = shares_of(t, sum);
    shares.up[q] = share.up;
    shares.diagonal[q] = share.diagonal;
    left.row[q] = share.left;
  }
};

// E of the pair's last cell. No path at all: nothing to pass back. A NaN poisons the sample.
DEVICE real seed_of(result_type value) { return value - value == 0 ? (real)1 : value != value ? (real)value : (real)0; }
// Whether that is 1, and parts of the matrix can be left out.
DEVICE bool has_path(result_type value) { return value - value == 0; }

// What a cell passes on: up, together with what its right neighbour passed diagonally, and diagonally. Products and sums are
// written as the instructions that they are: chosen by the compiler, they would differ from kernel to kernel.
DEVICE void pass_on(real e, real up_share, real diagonal_share, real& pass, real& diagonal) {
  pass = multiply_add(e, up_share, diagonal);
  diagonal = e * diagonal_share;
}
// What that leaves for the cell on its left.
DEVICE real leave_left(real e, real up_share, real diagonal_share) {
  return multiply_add(-e, diagonal_share, multiply_add(-e, up_share, e));
}
