// All that a rendered variant needs on the host: types, math, loads and the identity variant.
#pragma once

#include <warploom/load.hpp>
#include <warploom/math.hpp>

#include <warploom/variant_base.hpp>
