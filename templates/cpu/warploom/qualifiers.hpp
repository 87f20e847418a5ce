// How functions of generated code are declared on the host.
#pragma once

#define WL_FN inline __attribute__((always_inline))

namespace warploom {

constexpr float kInfinity = __builtin_inff();
constexpr float kNaN = __builtin_nanf("");
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

}  // namespace warploom
