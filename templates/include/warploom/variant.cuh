// All that a rendered variant needs on the device: types, math, loads and the identity variant.
#pragma once

#include <warploom/device/load.cuh>
#include <warploom/device/math.cuh>

#include <warploom/variant_base.hpp>
