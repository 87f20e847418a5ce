// How functions of generated code are declared on the device. Needs no host header.
#pragma once

#define WL_FN __device__ __forceinline__
// Called, so that what runs once takes no registers from the loop before it.
#define WL_CALLED_FN __device__ __noinline__

namespace warploom {

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kNaN = __builtin_bit_cast(float, 0x7fc00000);
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

}  // namespace warploom
