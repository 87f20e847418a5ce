// Stands in for the device's header of that name: functions are declared as on the host.
#pragma once

#include <warploom/qualifiers.hpp>

#define WL_CALLED_FN inline
