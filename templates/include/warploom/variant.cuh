// All that a rendered variant needs on the device: types, math, loads and the identity variant.
#pragma once

#include <warploom/load.cuh>
#include <warploom/math.cuh>

#include <warploom/variant_base.hpp>
