// What every source is made of, in order. A source sets WIDE, PACKED and SOURCE_NAME first.
#pragma once
#include "build.cuh"
#include "knobs.cuh"
#include "params.cuh"
#include "polling.cuh"
#include "element.cuh"
#include "scaled.cuh"
#include "strip.cuh"
#include "handoff.cuh"
#include "tickets.cuh"
#include "walker.cuh"
#include "checkpoint.cuh"
#include "forward.cuh"
