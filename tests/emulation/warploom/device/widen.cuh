// Stands in for the device's header of that name.
#pragma once

#include <warploom/variant.cuh>

namespace warploom {

inline float to_float(e5m2_t value) {
  return to_float(half_t{static_cast<unsigned short>(value.bits << 8)});
}
inline float to_float(e4m3_t value) {
  const unsigned magnitude = value.bits & 0x7fu, sign = (value.bits & 0x80u) << 8;
  const unsigned bits = magnitude == 0x7fu ? 0x7e00u : magnitude << 7 | sign;
  return 256.0f * to_float(half_t{static_cast<unsigned short>(bits)});
}
inline float to_float(i8_t value) { return float(value.bits); }

template <class Narrow, class Element>
void widen(unsigned bytes, Element, unsigned& low, unsigned& high) {
  unsigned wide[4];
  for (int i = 0; i < 4; ++i) {
    const Narrow number{static_cast<decltype(Narrow::bits)>(bytes >> 8 * i)};
    wide[i] = from_float<Element>(to_float(number)).bits;
  }
  low = wide[0] | wide[1] << 16, high = wide[2] | wide[3] << 16;
}

}  // namespace warploom
