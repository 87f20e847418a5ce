// Stands in for the device's header of that name: functors as the host computes them.
#pragma once

#include <warploom/variant.hpp>
