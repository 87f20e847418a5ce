#pragma once

#include <cute/layout.hpp>
